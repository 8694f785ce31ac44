"""The figures of a run as text."""

from __future__ import annotations

from collections.abc import Iterator

from lightserve.bench.client.results import LATENCIES, Run

BUSY_CORES = 0.7  # of one core per process; above it, the client itself may delay events
LATE_MS = 20.0


def lines_of(run: Run, processes: int) -> Iterator[str]:
    yield f"--- {run.name}"
    failed = f", {run.failed} FAILED" if run.failed else ", none failed"
    not_sent = f", {run.not_sent} not sent (--seconds)" if run.not_sent else ""
    yield f"{run.completed} requests completed in {run.seconds:.2f} s{failed}{not_sent}"
    yield f"{run.input_tokens:,} input tokens, {run.output_tokens:,} output tokens ({_sources(run)})"
    speed = run.throughput
    yield (
        f"throughput: {speed.requests:.2f} requests/s, {speed.input_tokens:,.1f} input tok/s, "
        f"{speed.output_tokens:,.1f} output tok/s"
    )
    if speed.goodput is not None and run.good_share is not None:
        yield f"goodput: {speed.goodput:.2f} requests/s, {run.good_share:.1%} of the requests met the SLO"
    yield f"{'ms':<5}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))
    for name in LATENCIES:
        if name in run.latencies:
            row = run.latencies[name]
            values = (row.mean, row.p50, row.p90, row.p95, row.p99, row.max)
            yield f"{name.upper():<5}" + "".join(f"{value:>10.2f}" for value in values)
    yield from notes_of(run, processes)


def notes_of(run: Run, processes: int) -> Iterator[str]:
    """What a reader of the figures must know."""
    for error, count in run.errors.items():
        yield f"failed: {count} x {error}"
    if run.tokens_per_event > 1.05:
        yield f"note: {run.tokens_per_event:.2f} tokens per event; ITL is the time between events, TPOT between tokens"
    if run.cached_tokens:
        yield f"note: the server took {run.cached_tokens:,} input tokens from its prefix cache"
    if run.concurrency is not None and run.rate is None and run.peak_in_flight < run.concurrency:
        yield f"note: at most {run.peak_in_flight} requests were in flight; for {run.concurrency}, raise --requests"
    if run.client_cores > BUSY_CORES * processes:
        yield (
            f"warning: the client used {run.client_cores:.2f} cores in {processes} process(es) and may have delayed "
            f"events; use --processes {processes + 1} or more"
        )
    if run.concurrency is None and run.late_p99_ms > LATE_MS:
        yield f"warning: requests were sent up to {run.late_p99_ms:.0f} ms late (p99); use more --processes"


def _sources(run: Run) -> str:
    if list(run.token_counts) == ["usage"]:
        return "counted by the server"
    counts = ", ".join(f"{source} {count}" for source, count in run.token_counts.items())
    return f"output by {counts}; input as asked for where the server sent no usage" if counts else "none"
