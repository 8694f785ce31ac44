"""What clients ask of a simulated server, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

VOCAB_SIZE = 32_000
FIRST_ID = 2  # of prompts: what is below, only the simulated model says
URGENT = -1  # the priority of urgent requests; that of the others is 0

Lengths = npt.NDArray[np.int64]
DrawLengths = Callable[[np.random.Generator, int], Lengths]


class Ask(NamedTuple):
    prompt_ids: list[int]
    output_len: int  # after so many tokens the model says EOS
    priority: int


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask for, and when: ``rate`` requests a second at random, or ``streams`` that ask one by one."""

    prompt_len: DrawLengths
    output_len: DrawLengths
    count: int = 1000
    rate: float | None = None
    streams: int = 64  # without a rate
    max_new_tokens: int = 2048  # what every client asks for; outputs are shorter
    num_prefixes: int = 0  # system prompts, each as likely
    prefix_len: int = 0
    urgent: float = 0.0  # share of the requests that are urgent
    seed: int = 0

    def asks(self) -> Iterator[Ask]:
        """Made one by one: a million prompts need not be in memory. No two share more than a system prompt."""
        rng = np.random.default_rng(self.seed)
        text: list[int] = rng.integers(FIRST_ID, VOCAB_SIZE, 1 << 17).tolist()
        prefixes = [rng.integers(FIRST_ID, VOCAB_SIZE, self.prefix_len).tolist() for _ in range(self.num_prefixes)] or [
            []
        ]
        rows = zip(
            self.prompt_len(rng, self.count).tolist(),
            np.minimum(self.output_len(rng, self.count), self.max_new_tokens).tolist(),
            rng.integers(0, len(text) // 2, self.count).tolist(),
            rng.integers(0, len(prefixes), self.count).tolist(),
            (rng.random(self.count) < self.urgent).tolist(),
            strict=True,
        )
        for number, (prompt_len, output_len, at, prefix, is_urgent) in enumerate(rows):
            own = [VOCAB_SIZE + number, *text[at : at + prompt_len - 1]]
            yield Ask(prefixes[prefix] + own, output_len, URGENT if is_urgent else 0)

    def arrivals(self) -> Iterator[float]:
        """When requests come by themselves."""
        if self.rate is None:
            return itertools.repeat(0.0, min(self.streams, self.count))
        gaps = np.random.default_rng(self.seed + 1).exponential(1 / self.rate, self.count)
        times: Iterator[float] = iter(np.cumsum(gaps).tolist())
        return times


def fixed(length: int) -> DrawLengths:
    return lambda rng, count: np.full(count, length)


def lognormal(median: float, sigma: float, most: int) -> DrawLengths:
    return lambda rng, count: np.clip(rng.lognormal(np.log(median), sigma, count), 1, most).astype(np.int64)


def mixed(common: DrawLengths, rare: DrawLengths, share: float) -> DrawLengths:
    """``share`` of the lengths are drawn from ``rare``."""
    return lambda rng, count: np.where(rng.random(count) < share, rare(rng, count), common(rng, count))


CHAT_PROMPT = lognormal(90, 1.3, 4000)  # like ShareGPT: 200 tokens on average
CHAT_OUTPUT = lognormal(120, 1.0, 2000)  # 195 on average
LOADS = {
    "sharegpt": Load(CHAT_PROMPT, CHAT_OUTPUT),
    "fixed": Load(fixed(1024), fixed(256), max_new_tokens=256),
    "long": Load(mixed(CHAT_PROMPT, lognormal(12_000, 0.4, 30_000), 0.05), CHAT_OUTPUT),
    "shared": Load(CHAT_PROMPT, lognormal(60, 0.8, 500), num_prefixes=64, prefix_len=2048),
}
