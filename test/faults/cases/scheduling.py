"""More than fits: the pool, the queue, a single request."""

from __future__ import annotations

from test.faults.case import Case
from test.faults.reactions import ABORTED, Reaction, answers, go_on, same_text
from test.faults.scene import Scene

SMALL_POOL = ("--max_total_token_num", "1000", "--router_token_ratio", "1")  # lengths are guessed up to all of it
NARROW = ("--null_step_ms", "5", "--running_max_req_size", "1", "--max_queue_size", "4")


def ask_for_more_than_the_pool(scene: Scene) -> None:
    for tokens in (1000, 10**6):
        scene.statuses.append(scene.complete({"prompt": [501], "max_tokens": tokens})[0])
    scene.statuses.append(scene.complete({"prompt": [501] * 1001})[0])


def fill_the_pool(scene: Scene) -> None:
    """Short answers first, so that the router expects short ones; then eight times what the pool holds."""
    scene.text_of({"prompt": [501, 502, 503], "max_tokens": 2, "n": 40})
    scene.streams += [scene.stream(prompt=[100 * i + 100], max_tokens=900) for i in range(8)]


def _paused_and_went_on(scene: Scene) -> None:
    go_on(scene)
    scene.wait_until(lambda: scene.server.metrics()["num_preemptions_total"] > 0)


def overfill_the_queue(scene: Scene) -> None:
    """One that runs, four that wait, and sixteen too many; then the first leaves, and the four are served."""
    first = scene.stream(max_tokens=scene.longest_answer())
    first.read_events(1)
    waiting = [scene.stream(prompt=[100 * i + 100], max_tokens=4) for i in range(4)]
    scene.wait_until(lambda: scene.server.metrics()["num_requests_waiting"] == 4)
    scene.statuses += [scene.complete({"prompt": [501], "max_tokens": 4})[0] for _ in range(16)]
    first.close()
    scene.streams += waiting


def _refused_and_went_on(scene: Scene) -> None:
    assert set(scene.statuses) == {429}
    go_on(scene)


def abort_all(scene: Scene) -> None:
    streams = [scene.stream(prompt=[100 * i + 100], max_tokens=scene.longest_answer()) for i in range(8)]
    for stream in streams[:4]:
        stream.read_events(1)
    scene.wait_until(lambda: scene.requests_in_router() == len(streams))  # who comes later is not meant
    assert scene.client.post("/abort_request", {"abort_all": True})[0] == 200
    assert all(b"request_aborted" in stream.rest() for stream in streams)


CASES = [
    Case("a request larger than the pool", ask_for_more_than_the_pool, answers(400), flags=SMALL_POOL, is_long=True),
    Case(
        "answers of eight times the pool",
        fill_the_pool,
        Reaction("some are paused, all end, same text", _paused_and_went_on, same_text),
        flags=SMALL_POOL,
        within_s=60.0,
        is_long=True,
    ),
    Case(
        "the queue is full",
        overfill_the_queue,
        Reaction("429; those that wait are served", _refused_and_went_on, same_text),
        flags=NARROW,
        within_s=20.0,
        is_long=True,
    ),
    Case("an operator aborts all", abort_all, ABORTED),
]
