"""What a simulation measures."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SUMS = (
    "cpu_s", "steps", "requests", "output_tokens", "prompt_tokens", "cached_tokens", "preemptions", "ttft",
    "urgent_ttft", "gaps", "gap_counts", "moved_tokens", "tier_hits", "tier_recomputed",
)  # fmt: skip


@dataclass(slots=True)
class Result:
    seconds: float = 0.0  # simulated
    cpu_s: float = 0.0  # CPU time that the simulation took
    steps: int = 0
    requests: int = 0  # finished requests
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache
    peak_used: int = 0
    preemptions: int = 0
    moved_tokens: int = 0  # whose KV prefill servers sent to decode servers
    tier_hits: Counter[str] = field(default_factory=Counter)  # tokens that were loaded, by tier
    tier_recomputed: Counter[str] = field(default_factory=Counter)  # tokens that were there, and computed sooner
    ttft: array[float] = field(default_factory=lambda: array("d"))
    urgent_ttft: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))  # seconds between two tokens of a request
    gap_counts: array[int] = field(default_factory=lambda: array("q"))  # requests with that gap

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def itl(self, share: float) -> float:
        """The inter-token latency that ``share`` of the gaps do not exceed."""
        return quantile(np.array(self.gaps), np.array(self.gap_counts), share)


def merged(results: Sequence[Result]) -> Result:
    """Of clusters that served at the same time."""
    whole = Result()
    for result in results:
        whole.seconds = max(whole.seconds, result.seconds)
        whole.peak_used = max(whole.peak_used, result.peak_used)
        for name in SUMS:
            setattr(whole, name, getattr(whole, name) + getattr(result, name))
    return whole


def quantile(values: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], share: float) -> float:
    """The smallest of the values, which occur ``counts`` times, that ``share`` of them do not exceed; 0 if empty."""
    if not len(values):
        return 0.0
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(reached, share * reached[-1])])
