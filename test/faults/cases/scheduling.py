"""More than fits into the KV pool, the queue or a single request."""

from __future__ import annotations

from test.faults.case import Case
from test.faults.harness import FaultContext
from test.faults.reactions import ABORTED, Reaction, responds, same_text, streams_continue

# the whole pool may be filled by estimated lengths
SMALL_POOL = ("--max_total_token_num", "1000", "--router_token_ratio", "1")
NARROW = ("--null_step_ms", "5", "--running_max_req_size", "1", "--max_queue_size", "4")


def ask_for_more_than_the_pool(context: FaultContext) -> None:
    for tokens in (1000, 10**6):
        context.statuses.append(context.complete({"prompt": [501], "max_tokens": tokens})[0])
    context.statuses.append(context.complete({"prompt": [501] * 1001})[0])


def fill_the_pool(context: FaultContext) -> None:
    """Short responses first, so that the router expects short ones; then eight times the size of the pool."""
    context.complete_text({"prompt": [501, 502, 503], "max_tokens": 2, "n": 40})
    context.streams += [context.stream(prompt=[100 * i + 100], max_tokens=900) for i in range(8)]


def _preempted_then_completed(context: FaultContext) -> None:
    streams_continue(context)
    context.wait_until(lambda: context.server.metrics()["num_preemptions_total"] > 0)


def overfill_the_queue(context: FaultContext) -> None:
    """One request runs, four wait, sixteen are too many. Then the first client leaves, and the four are served."""
    first = context.stream(max_tokens=context.longest_response())
    first.read_events(1)
    waiting = [context.stream(prompt=[100 * i + 100], max_tokens=4) for i in range(4)]
    context.wait_until(lambda: context.server.metrics()["num_requests_waiting"] == 4)
    context.statuses += [context.complete({"prompt": [501], "max_tokens": 4})[0] for _ in range(16)]
    first.close()
    context.streams += waiting


def _refused_then_completed(context: FaultContext) -> None:
    assert set(context.statuses) == {429}
    streams_continue(context)


def abort_all(context: FaultContext) -> None:
    streams = [context.stream(prompt=[100 * i + 100], max_tokens=context.longest_response()) for i in range(8)]
    for stream in streams[:4]:
        stream.read_events(1)
    context.wait_until(lambda: context.requests_in_router() == len(streams))  # later requests would not be aborted
    assert context.client.post("/abort_request", {"abort_all": True})[0] == 200
    assert all(b"request_aborted" in stream.read_all() for stream in streams)


PREEMPTED_THEN_COMPLETED = Reaction("some are paused, all end, same text", _preempted_then_completed, same_text)
CASES = [
    Case("a request larger than the pool", ask_for_more_than_the_pool, responds(400), flags=SMALL_POOL, is_long=True),
    Case(
        "answers of eight times the pool",
        fill_the_pool,
        PREEMPTED_THEN_COMPLETED,
        flags=SMALL_POOL,
        within_s=60.0,
        is_long=True,
    ),
    Case(
        "the queue is full",
        overfill_the_queue,
        Reaction("429; those that wait are served", _refused_then_completed, same_text),
        flags=NARROW,
        within_s=20.0,
        is_long=True,
    ),
    Case("an operator aborts all", abort_all, ABORTED),
]
