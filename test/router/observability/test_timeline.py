"""What the router records about each request."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from lightserve.messages.output import RequestTimeline, TimelineEvent, Timelines
from lightserve.messages.params import GenerationParams, SchedulingParams
from lightserve.messages.request import AbortReq, GenerateReq, GetTimelines
from lightserve.router.observability.timeline import MAX_EVENTS, TimelineRing
from test.router.test_manager import Router, check, request
from test.waiting import until


def named(req_id: int, prompt_len: int = 3, max_new_tokens: int = 4) -> GenerateReq:
    return msgspec.structs.replace(request(req_id, prompt_len, max_new_tokens), request_id=f"client-{req_id}")


def timeline_of(router: Router, req_id: int) -> RequestTimeline:
    (found,) = router.manager.timelines.answer(GetTimelines(0, f"client-{req_id}", 10)).timelines
    return found


def kinds_of(router: Router, req_id: int) -> list[str]:
    return [event.kind for event in timeline_of(router, req_id).events]


def failed_with(router: Router, req_id: int) -> int | None:
    failed = [failure for batch in router.batches for failure in batch.failed if failure.req_id == req_id]
    return failed[0].status if failed else None


def replies(router: Router) -> list[Timelines]:
    return [message for message in router.sent if isinstance(message, Timelines)]


def test_a_request_is_queued_admitted_prefilled_in_chunks_and_finished(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(named(1, prompt_len=70, max_new_tokens=20))

        await router.until(lambda: router.has_finished(1))

        found = timeline_of(router, 1)
        queued, admitted, first, second, first_token, finished = found.events
        assert [event.kind for event in found.events] == [
            *("queued", "admitted", "prefill", "prefill", "first_token", "finished")
        ]
        assert (found.prompt_tokens, found.max_new_tokens, admitted.tokens) == (70, 20, 0)
        assert (first.tokens, second.tokens) == (64, 6)  # the step has at most 64
        assert first.duration_s > 0
        assert finished.tokens == 20
        assert finished.detail == "length"
        times = [found.arrived_s, *(event.at_s for event in (queued, admitted, first, second, first_token, finished))]
        assert times == sorted(times)

    check(scenario, tmp_path)


def test_cached_tokens_are_shown_and_a_chunk_of_one_token_too(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        for req_id in (1, 2):
            router.send(named(req_id, prompt_len=20))
            await router.until(partial(router.has_finished, req_id))

        _, admitted, prefill, *_ = timeline_of(router, 2).events
        assert (admitted.kind, admitted.tokens) == ("admitted", 19)
        assert (prefill.kind, prefill.tokens) == ("prefill", 1)

    check(scenario, tmp_path)


def test_a_preempted_request_shows_its_pause_and_its_second_admission(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(named(1, max_new_tokens=50))
        await router.until(lambda: len(router.tokens_of(1)) > 2)
        router.scheduler.only_group.preemption.preempt_newest()

        await router.until(lambda: router.has_finished(1))

        kinds = kinds_of(router, 1)
        assert kinds[:4] == ["queued", "admitted", "prefill", "first_token"]
        assert kinds[4:6] == ["preempted", "admitted"]
        assert kinds[-1] == "finished"
        (preempted,) = [event for event in timeline_of(router, 1).events if event.kind == "preempted"]
        assert preempted.tokens > 2

    check(scenario, tmp_path)


def test_a_request_survives_lost_workers_in_its_timeline(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.stuck_at = 3
        router.send(named(1))
        await until(lambda: len(router.model.steps) == 3)
        router.model.die()
        await until(lambda: bool(router.model.restart_requests))
        router.replace_model()

        await router.until(lambda: router.has_finished(1))

        assert kinds_of(router, 1)[3:6] == ["first_token", "workers_lost", "admitted"]

    check(scenario, tmp_path)


def test_output_that_is_computed_again_is_shown_in_chunks(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.stuck_at = 82
        router.send(named(1, max_new_tokens=90))
        await until(lambda: len(router.model.steps) == 82)
        router.model.die()
        await until(lambda: bool(router.model.restart_requests))
        router.replace_model()

        await router.until(lambda: router.has_finished(1))

        events = timeline_of(router, 1).events
        lost = next(place for place, event in enumerate(events) if event.kind == "workers_lost")
        again = [event.tokens for event in events[lost:] if event.kind == "prefill"]
        assert again == [64, 3 + events[lost].tokens - 64]  # the prompt and the output so far

    check(scenario, tmp_path)


def test_refused_aborted_failed_and_late_requests_end_in_their_timelines(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        router.send(named(1, max_new_tokens=50))
        late = SchedulingParams(timeout_s=1e-6)
        router.send(msgspec.structs.replace(named(2), scheduling=late, arrived_s=time.monotonic() - 1))
        await router.until(lambda: failed_with(router, 2) == 504)
        router.send(AbortReq(1))
        await until(lambda: kinds_of(router, 1)[-1] == "finished")
        router.model.failing.add(3)
        router.model.may_run.set()
        router.send(named(3))
        await router.until(lambda: failed_with(router, 3) == 400)

        assert timeline_of(router, 1).events[-1].detail == "abort"
        assert timeline_of(router, 2).events[-1].detail.startswith("504: the request exceeded its timeout")
        assert timeline_of(router, 3).events[-1].kind == "failed"

    check(scenario, tmp_path)


def test_a_full_queue_is_in_the_timeline(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.model.may_run.clear()
        for req_id in range(12):  # the first step may take two of them before the last ones come
            router.send(named(req_id))
        await router.until(lambda: any(batch.failed for batch in router.batches))

        failed_ids = [failure.req_id for batch in router.batches for failure in batch.failed]
        assert failed_with(router, failed_ids[0]) == 429
        (refused,) = timeline_of(router, failed_ids[0]).events
        assert refused.kind == "refused"
        assert "the queue is full" in refused.detail

    check(scenario, tmp_path, max_queue_size=2)


def test_the_router_answers_the_http_process_that_asked(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.send(named(1))
        await router.until(lambda: router.has_finished(1))
        router.send(GetTimelines(77, "chatcmpl-client-1", 10))  # the id of the response does as well

        await router.until(lambda: bool(replies(router)))

        (reply,) = replies(router)
        assert reply.query_id == 77
        assert [one.req_id for one in reply.timelines] == [1]

    check(scenario, tmp_path)


def test_only_the_last_requests_are_kept_newest_first() -> None:
    ring = TimelineRing(3)
    for req_id in range(5):
        ring.start(GenerateReq(req_id, [1], GenerationParams(), 0.0, request_id="same"))

    found = ring.answer(GetTimelines(0, None, 2)).timelines

    assert [one.req_id for one in found] == [4, 3]
    assert [one.req_id for one in ring.answer(GetTimelines(0, "same", 10)).timelines] == [4, 3, 2]


def test_nothing_is_recorded_with_a_size_of_zero() -> None:
    ring = TimelineRing(0)

    ring.start(GenerateReq(1, [1], GenerationParams(), 0.0)).queued()
    assert not ring.answer(GetTimelines(0, None, 10)).timelines


def test_a_prompt_of_very_many_chunks_keeps_its_beginning_and_its_end() -> None:
    ring = TimelineRing(1)
    timeline = ring.start(GenerateReq(1, [1], GenerationParams(), 0.0))
    for i in range(MAX_EVENTS + 10):
        timeline.prefill(float(i), i + 0.5, 7)
    timeline.first_token(1e6)

    found = timeline.snapshot()

    assert len(found.events) == MAX_EVENTS
    assert found.events_left_out == 11
    assert found.events[0] == TimelineEvent("prefill", 0.0, 0.5, 7)
    assert found.events[-1].kind == "first_token"


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "msg_"])
def test_a_request_is_found_by_the_id_of_its_response(prefix: str) -> None:
    ring = TimelineRing(1)
    ring.start(GenerateReq(1, [1], GenerationParams(), 0.0, request_id="abc"))

    assert ring.answer(GetTimelines(0, f"{prefix}abc", 1)).timelines
    assert not ring.answer(GetTimelines(0, f"{prefix}ab", 1)).timelines


def test_a_client_gets_only_its_own_requests() -> None:
    ring = TimelineRing(4)
    for req_id, owner in enumerate("abab"):
        ring.start(GenerateReq(req_id, [1], GenerationParams(), 0.0, request_id="same", owner=owner))

    def found(request_id: str | None, limit: int, owner: str | None) -> list[int]:
        return [one.req_id for one in ring.answer(GetTimelines(0, request_id, limit, owner)).timelines]

    assert found(None, 9, "a") == found("same", 9, "a") == [2, 0]
    assert found(None, 1, "b") == [3]
    assert found(None, 9, "c") == found(None, 9, "") == []
    assert found(None, 9, None) == [3, 2, 1, 0]
