"""The results of a load test, as they are stored in a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

KIND = "lightserve bench serve"
VERSION = 1
PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end-to-end latency",
}


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Histogram(msgspec.Struct, frozen=True):
    """``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""

    edges: list[float]
    counts: list[int]


class Throughput(msgspec.Struct, frozen=True):
    """Per second, of completed requests. Goodput counts those that met the SLO; None: no SLO was given."""

    requests: float
    input_tokens: float
    output_tokens: float
    goodput: float | None = None


class RequestTimes(msgspec.Struct, frozen=True):
    """Seconds since the start of the run, and what the request was. ``first`` is None if no output arrived."""

    sent: float
    first: float | None
    end: float
    input_tokens: int
    output_tokens: int
    error: str = ""


class Series(msgspec.Struct, frozen=True):
    """Over the time of the run, in steps of ``step_s``."""

    step_s: float
    output_tokens_per_s: list[float]
    in_flight: list[float]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a sweep."""

    rate: float | None  # requests per second; None: no limit
    concurrency: int | None  # None: no limit
    seconds: float
    completed: int
    failed: int
    not_sent: int  # because --seconds had passed
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    token_counts: dict[str, int]  # number of requests by the source of their number of output tokens
    tokens_per_event: float
    throughput: Throughput
    good_share: float | None  # of all requests that were sent
    peak_in_flight: int
    latencies: dict[str, Latency]  # by the keys of LATENCIES; a latency without a value is missing
    histograms: dict[str, Histogram]
    late_p99_ms: float  # how much later than planned requests were sent
    client_cores: float  # CPU seconds of the client per second
    errors: dict[str, int]  # number of requests by message
    requests: list[RequestTimes]
    series: Series

    @property
    def name(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate:g} requests/s"]
        parts += [] if self.concurrency is None else [f"concurrency {self.concurrency}"]
        return ", ".join(parts) or "all requests at once"


class Results(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    version: int
    created: int  # Unix time
    label: str
    url: str
    model: str
    slo: dict[str, float]  # milliseconds by the keys of LATENCIES
    options: dict[str, Any]  # flags of the command that decide what is measured
    runs: list[Run]


def save(results: Results, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(results))


def load(path: Path) -> Results:
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no result of {KIND}: {error}") from error
    if results.kind != KIND or results.version != VERSION:
        raise ValueError(
            f"{path} is of {results.kind!r} version {results.version}; expected {KIND!r} version {VERSION}"
        )
    return results
