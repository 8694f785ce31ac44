"""What the timeline, the trace and the profile of a request cost: microseconds of CPU time, the least of many runs.

    python -m benchmark.serving.observability

benchmark.scheduler measures the steps of the router, which record nothing per token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.tracing.exporter import has_otlp
from lightserve.httpserver.tracing.request_trace import RequestTrace, TraceRecord
from lightserve.messages.output import Admission
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.request import GenerateReq
from lightserve.router.observability.timeline import TimelineRing
from lightserve.utils.trace_recorder import TraceRecorder

CALLS, RUNS = 2_000, 25
RECORDED = 256  # requests
CHUNKS = 2  # of a prompt
HEADER = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MESSAGE = GenerateReq(1, [1] * 512, GenerationParams(), 0.0, request_id="0123456789abcdef")


def main() -> None:
    rows = {
        "router: timeline of a request": _timeline(TimelineRing(RECORDED)),
        "router: timelines off": _timeline(TimelineRing(0)),
        "HTTP process: trace of a request": _trace,
        "router: profile of a step, while one runs": _profiled_step(TraceRecorder("router", CALLS * (RUNS + 1) * 4)),
    }
    for name, call in rows.items():
        print(f"{name:44} {_microseconds(call):7.2f} us")
    if has_otlp():
        print(f"{'thread of the exporter: encoding a trace':44} {_encoding_us():7.2f} us")


def _microseconds(call: Callable[[], object]) -> float:
    """CPU time of a call: the least over the runs, without the loop."""
    return max(_least_us(call) - _least_us(lambda: None), 0.0)


def _least_us(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        begin = time.thread_time_ns()
        for _ in itertools.repeat(None, CALLS):
            call()
        best = min(best, (time.thread_time_ns() - begin) / CALLS / 1e3)
    return best


def _timeline(ring: TimelineRing) -> Callable[[], None]:
    """All that the router records of a request with two chunks."""

    def record() -> None:
        timeline = ring.start(MESSAGE)
        timeline.queued()
        timeline.admitted(1.0, 64)
        for _ in range(CHUNKS):
            timeline.prefill(1.0, 1.5, 256)
        timeline.first_token(2.0)
        timeline.finished(FinishReason.STOP, 3.0, 100)

    return record


def _trace(export: Callable[[TraceRecord], None] = lambda record: None) -> None:
    """All that an HTTP process does for a trace in its event loop."""
    trace = RequestTrace(HEADER, "model", export)
    log = AccessLog("0123456789abcdef", "/v1/chat/completions", is_written=False)
    trace.watch(log)
    trace.context.header(trace.span_id)
    log.is_generating = True
    log.record_admission(Admission(0.1, 64), is_first_choice=True)
    log.record_finish(FinishReason.STOP)
    log.close(None)
    trace.response_sent(200, "0123456789abcdef", "/v1/chat/completions")


def _profiled_step(recorder: TraceRecorder) -> Callable[[], None]:
    def record() -> None:
        recorder.add("plan", 1.0, 2.0, new=1, freed=0)
        recorder.add("send", 2.0, 3.0, requests=256)
        recorder.add("report tokens", 3.0, 4.0)
        recorder.add_on("steps in flight 0", "decode step", 1.0, 4.0)

    return record


def _encoding_us() -> float:
    from lightserve.httpserver.tracing.otlp import OtlpEncoder

    records: list[TraceRecord] = []
    _trace(records.append)
    encode = OtlpEncoder({"service.name": "lightserve"}).encode
    return _least_us(lambda: encode(records))


if __name__ == "__main__":
    main()
