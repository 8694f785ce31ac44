"""The loads of the guard, each as flags of ``lightserve bench serve``, and the figures that it judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightserve.bench.client.arguments import Arguments, parse
from lightserve.bench.client.results import Run
from lightserve.bench.client.sweep import ServerProblemError, make_sweep

MORE_IS_BETTER = {"tokens/s"}
WARM_UP_SEED = 1_000_000  # prompts of the warm-up are no prompts of a load, or the prefix cache would answer those


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    requests: int
    input_len: int
    output_len: int
    figures: Sequence[str]  # "tokens/s", or a latency and its statistic
    concurrency: int | None = None
    rate: float | None = None
    processes: int = 1  # of the client

    @property
    def output_tokens(self) -> int:
        """Of all requests, on average: a load with arrivals varies the lengths."""
        return self.requests * self.output_len

    def arguments(self, url: str, seed: int) -> Arguments:
        """Each seed has prompts of its own: no cache of an earlier run answers them."""
        flags = {
            "url": url,
            "requests": self.requests,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "processes": self.processes,
            "concurrency": self.concurrency,
            "rate": self.rate,
            "seed": seed,
            "range_ratio": 0.5 if self.rate else 0,
        }
        given = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
        return parse([*given, "--quiet"])

    def run(self, url: str, seed: int) -> dict[str, float]:
        """The value of each figure. Raises ServerProblemError if a request fails: the others had an easier load."""
        (run,) = make_sweep(self.arguments(url, seed)).runs()
        if run.failed:
            reasons = "; ".join(f"{count} times {error}" for error, count in run.errors.items())
            raise ServerProblemError(f"{self.name}: {run.failed} of {self.requests} requests failed: {reasons}")
        return {figure: _value(run, figure) for figure in self.figures}


def _value(run: Run, figure: str) -> float:
    if figure == "tokens/s":
        return run.throughput.output_tokens
    latency, statistic = figure.split()
    return float(getattr(run.latencies[latency.lower()], statistic))


STREAMS = ("tokens/s", "TTFT p50", "ITL p99")
ARRIVALS = ("TTFT p50", "TTFT p99", "ITL p99")
# Llama-3-8B on an H200: about a minute for all of them.
CARD_LOADS = (
    Load("one", 4, 128, 256, ("TPOT p50", "TTFT p50"), concurrency=1),
    Load("deep", 4, 8000, 8, ("TTFT p50",), concurrency=1),
    Load("c8", 32, 512, 256, STREAMS, concurrency=8, processes=2),
    Load("c64", 192, 1024, 256, STREAMS, concurrency=64, processes=4),
    Load("c256", 512, 1024, 256, STREAMS, concurrency=256, processes=8),
    Load("rate20", 300, 512, 128, ARRIVALS, rate=20, processes=4),
)
# A tiny model on a CPU: seconds.
QUICK_LOADS = (
    Load("one", 2, 16, 32, ("TPOT p50", "TTFT p50"), concurrency=1),
    Load("c8", 16, 32, 16, STREAMS, concurrency=8),
    Load("rate20", 20, 16, 8, ARRIVALS, rate=20),
)


def warm_up(url: str, loads: Sequence[Load]) -> None:
    """Few tokens of every load: whatever a server prepares at first use belongs to no figure."""
    for load in loads:
        short = Load(load.name, load.concurrency or 8, load.input_len, 4, (), load.concurrency, None, load.processes)
        short.run(url, WARM_UP_SEED)
