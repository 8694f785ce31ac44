"""From records to figures, with the definitions of vLLM's benchmark.

TTFT is the time from sending to the first event with output. E2E is the time to the last one. TPOT is
(E2E - TTFT) / (output tokens - 1). ITL is the time between two events of a request: an event may have several tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightserve.bench.client.load import LoadResult
from lightserve.bench.client.record import Record
from lightserve.bench.client.results import (
    PERCENTILES,
    Histogram,
    Latency,
    RequestTimes,
    Run,
    Series,
    Throughput,
)
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

BINS = 40
SERIES_STEPS = 120
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep. None: no limit."""

    rate: float | None
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Judge:
    """What else is known about the requests of a run."""

    output_lens: Sequence[int]  # asked for, by the index of the request
    input_lens: Sequence[int] = ()
    slo: dict[str, float] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None

    def input_tokens(self, record: Record) -> int:
        if record.input_tokens is not None or not self.input_lens:
            return record.input_tokens or 0
        return self.input_lens[record.index]

    def output_tokens(self, record: Record) -> tuple[int, str]:
        """Number of output tokens of a completed request, and where it comes from."""
        if record.output_tokens is not None:
            return record.output_tokens, "usage"
        if self.tokenizer is not None:
            return len(self.tokenizer.encode(record.text, add_special_tokens=False)), "tokenizer"
        if record.finish_reason == "length":
            return self.output_lens[record.index], "length asked for"
        return len(record.event_times), "number of events"


@dataclass(frozen=True, slots=True)
class _Completed:
    record: Record
    tokens: int
    source: str

    @property
    def tpot_s(self) -> float | None:
        """None: one token has no time between tokens."""
        return (self.record.e2e_s - self.record.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None

    def meets(self, slo: dict[str, float]) -> bool:
        values = {"ttft": self.record.ttft_s, "tpot": self.tpot_s or 0.0, "e2e": self.record.e2e_s}
        return all(values[name] * 1e3 <= limit for name, limit in slo.items())


def summarize(result: LoadResult, point: Point, judge: Judge) -> Run:
    records = result.records
    seconds = max(result.seconds, 1e-9)
    completed = [_Completed(r, *judge.output_tokens(r)) for r in records if not r.error]
    tokens = sum(done.tokens for done in completed)
    input_tokens = sum(judge.input_tokens(done.record) for done in completed)
    good = sum(done.meets(judge.slo) for done in completed)
    events = sum(len(done.record.event_times) for done in completed)
    samples = _samples(completed)
    return Run(
        rate=point.rate,
        concurrency=point.concurrency,
        seconds=seconds,
        completed=len(completed),
        failed=len(records) - len(completed),
        not_sent=len(judge.output_lens) - len(records),
        input_tokens=input_tokens,
        output_tokens=tokens,
        cached_tokens=sum(done.record.cached_tokens for done in completed),
        token_counts=dict(Counter(done.source for done in completed)),
        tokens_per_event=tokens / events if events else 0.0,
        throughput=Throughput(
            requests=len(completed) / seconds,
            input_tokens=input_tokens / seconds,
            output_tokens=tokens / seconds,
            goodput=good / seconds if judge.slo else None,
        ),
        good_share=good / len(records) if judge.slo and records else None,
        peak_in_flight=_peak_in_flight(records),
        latencies={name: latency_of(values) for name, values in samples.items() if len(values)},
        histograms={name: histogram_of(values) for name, values in samples.items() if len(values)},
        late_p99_ms=float(np.percentile([r.sent - r.due for r in records], 99)) * 1e3 if records else 0.0,
        client_cores=result.cpu_s / seconds,
        errors=dict(Counter(r.error for r in records if r.error).most_common()),
        requests=_request_times(records, result.start, judge),
        series=_series(completed, records, result),
    )


def _samples(completed: list[_Completed]) -> dict[str, Array]:
    """Milliseconds of each latency."""
    itls = [itl for done in completed for itl in done.record.itls_s]
    seconds = {
        "ttft": [done.record.ttft_s for done in completed],
        "tpot": [done.tpot_s for done in completed if done.tpot_s is not None],
        "itl": itls,
        "e2e": [done.record.e2e_s for done in completed],
    }
    return {name: np.asarray(values, dtype=np.float64) * 1e3 for name, values in seconds.items()}


def latency_of(values: Array) -> Latency:
    """Percentiles are interpolated between the nearest values."""
    p50, p90, p95, p99 = (float(p) for p in np.percentile(values, PERCENTILES))
    return Latency(mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=float(values.max()))


def histogram_of(values: Array) -> Histogram:
    """Up to the 99.5th percentile; the last bin has the rest too. A few outliers would hide the others."""
    top = float(np.percentile(values, 99.5))
    low = float(values.min())
    if top <= low:
        top = low + max(abs(low), 1.0) * 1e-3
    counts, edges = np.histogram(np.minimum(values, top), BINS, (low, top))
    return Histogram([float(edge) for edge in edges], [int(count) for count in counts])


def _end_of(record: Record) -> float:
    return record.ended if record.error else record.event_times[-1]


def _peak_in_flight(records: list[Record]) -> int:
    changes = sorted([(r.sent, 1) for r in records] + [(_end_of(r), -1) for r in records])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def _request_times(records: list[Record], start: float, judge: Judge) -> list[RequestTimes]:
    return [
        RequestTimes(
            sent=r.sent - start,
            first=r.event_times[0] - start if r.event_times else None,
            end=_end_of(r) - start,
            input_tokens=judge.input_tokens(r),
            output_tokens=0 if r.error else judge.output_tokens(r)[0],
            error=r.error,
        )
        for r in records
    ]


def _series(completed: list[_Completed], records: list[Record], result: LoadResult) -> Series:
    step_s = max(result.seconds, 1e-9) / SERIES_STEPS
    edges = result.start + step_s * np.arange(SERIES_STEPS + 1)
    tokens = np.zeros(SERIES_STEPS)
    for done in completed:  # the tokens of a request are spread evenly over its events
        times = done.record.event_times
        tokens += np.histogram(times, edges)[0] * (done.tokens / len(times))
    middles = (edges[:-1] + edges[1:]) / 2
    sent = np.sort([r.sent for r in records])
    ended = np.sort([_end_of(r) for r in records])
    in_flight = np.searchsorted(sent, middles) - np.searchsorted(ended, middles)
    return Series(step_s, [float(n) for n in tokens / step_s], [float(n) for n in in_flight])
