"""The dispatcher with real routers: random failures, and every kind of message."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from lightserve.config import RouterConfig
from lightserve.messages.control import HttpProcessLost
from lightserve.messages.output import ProfileReply, Timelines
from lightserve.messages.params import FinishReason, GenerationParams, SchedulingParams
from lightserve.messages.request import (
    REQ_ID_BITS,
    AbortByRequestId,
    AbortReq,
    ContinueReq,
    GenerateReq,
    GetTimelines,
    ReleaseParents,
    SpanCounts,
    StartProfile,
)
from test.cluster.local_cluster import LocalCluster, local_cluster, token_of
from test.waiting import until

LONG = 1000  # tokens of a response that runs as long as a test needs it


def check(scenario: Callable[[LocalCluster], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with local_cluster(**options) as cluster:
            await scenario(cluster)

    asyncio.run(run())


def tokens(seed: int, count: int) -> list[int]:
    return [token_of(seed, position) for position in range(1, count + 1)]


@pytest.mark.parametrize("policy", ["prefix", "round_robin"])
@pytest.mark.parametrize("seed", range(4))
def test_random_failures_lose_no_request_and_change_no_token(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.cluster.dispatcher.MAX_CRASHES", 1000)  # none of them is a request's fault
    choice = random.Random(seed)

    async def scenario(cluster: LocalCluster) -> None:
        lengths: dict[int, int] = {}
        for req_id in range(60):
            lengths[req_id] = choice.randrange(1, 30)
            prompt = [choice.randrange(3)] * choice.randrange(1, 300)
            cluster.send(req_id, prompt, lengths[req_id], seed=req_id)
            if choice.random() < 0.3:
                for _ in range(choice.randrange(20)):
                    await asyncio.sleep(0)  # not a time, but some turns of the loop: the failure hits any moment
                break_something(cluster, choice)
        for number in range(3):
            if number not in cluster.engines:
                cluster.start(number)
            elif not cluster.engines[number].manager.steps.has_workers:
                cluster.replace_workers(number)

        await cluster.until(lambda: cluster.has_ended(*lengths))

        assert not cluster.failed
        assert set(cluster.ended.values()) == {1}
        assert {req_id: cluster.tokens[req_id] for req_id in lengths} == {
            req_id: tokens(req_id, count) for req_id, count in lengths.items()
        }
        await until(lambda: all(engine.pool.used == 0 for engine in cluster.engines.values()))

    check(scenario, num_engines=3, policy=policy)


def break_something(cluster: LocalCluster, choice: random.Random) -> None:
    number = choice.randrange(3)
    if number not in cluster.engines:
        cluster.start(number)
    elif not cluster.engines[number].manager.steps.has_workers:
        cluster.replace_workers(number)
    elif choice.random() < 0.5 and len(cluster.engines) > 1:
        cluster.kill_router(number)
    elif not cluster.engines[number].scheduler.is_isolating_crash:  # a second crash would be a request's fault
        cluster.kill_workers(number)


def test_a_request_without_a_seed_samples_on_in_another_engine_as_it_began() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, [5, 6], 40)
        await cluster.until(lambda: len(cluster.tokens[0]) > 3)
        engine = cluster.placement.engine_of(0)
        assert engine is not None
        seed = engine.requests[0].request.params.sampling.seed
        assert seed is not None

        cluster.kill_router(engine.number)
        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.tokens[0] == tokens(seed, 40)

    check(scenario)


def test_requests_wait_for_an_engine_if_none_is_left() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, [5], 40, seed=1)
        await cluster.until(lambda: len(cluster.tokens[0]) > 3)
        cluster.kill_router(0)
        cluster.kill_router(1)
        cluster.send(1, [5], 4, seed=2)
        cluster.send(2, [5], 4, scheduling=SchedulingParams(timeout_s=0.05))
        await cluster.until(lambda: cluster.has_ended(2))
        assert cluster.failed[2].status == 503
        await cluster.until(lambda: cluster.stats is not None and not cluster.stats.has_workers)

        cluster.start(1)

        await cluster.until(lambda: cluster.has_ended(0, 1))
        assert (cluster.tokens[0], cluster.tokens[1]) == (tokens(1, 40), tokens(2, 4))
        await cluster.until(lambda: cluster.stats is not None and cluster.stats.has_workers)

    check(scenario)


def test_a_request_that_crashes_workers_costs_two_engines_their_workers_and_no_other_request() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        for engine in cluster.engines.values():
            engine.model.crashes_at = 666
        for req_id in range(6):
            cluster.send(req_id, [5] * 70, LONG, seed=req_id)
        await cluster.until(lambda: all(len(cluster.tokens[req_id]) > 2 for req_id in range(6)))

        cluster.send(9, [666, 5], 4)
        await cluster.until(lambda: cluster.has_ended(9))

        assert cluster.failed[9].status == 500
        crashed = [engine.manager.steps.has_workers for engine in cluster.engines.values()].count(False)
        assert crashed == 2
        cluster.replace_workers(next(n for n, one in cluster.engines.items() if not one.manager.steps.has_workers))
        await cluster.until(lambda: cluster.has_ended(*range(6)))
        assert [cluster.tokens[req_id] for req_id in range(6)] == [tokens(req_id, LONG) for req_id in range(6)]

    check(scenario, num_engines=3, pool=16384)


def test_a_request_that_kills_routers_fails_before_it_has_killed_all() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        for engine in cluster.engines.values():
            engine.model.may_run.clear()
        cluster.send(0, [5], 4)
        for _ in range(3):
            await until(lambda: cluster.placement.engine_of(0) is not None)
            engine_now = cluster.placement.engine_of(0)
            assert engine_now is not None
            cluster.kill_router(engine_now.number)

        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.failed[0].status == 500
        assert len(cluster.engines) == 1

    check(scenario, num_engines=4)


def test_an_engine_that_hangs_loses_its_requests_and_its_late_tokens_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightserve.cluster.dispatcher.TICK_S", 0.001)
    monkeypatch.setattr("lightserve.router.manager.HEARTBEAT_S", 0.002)
    monkeypatch.setattr("lightserve.cluster.dispatcher.SILENT_TICKS", 100)

    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, [5], LONG, seed=3)
        await cluster.until(lambda: len(cluster.tokens[0]) > 3)
        placed = cluster.placement.engine_of(0)
        assert placed is not None
        channel: Any = cluster.engines[placed.number].from_engine
        held: list[Any] = []
        channel_send, channel.send = channel.send, held.append

        await cluster.until(lambda: cluster.placement.engine_of(0) is not placed)
        channel.send = channel_send
        for message in held:
            channel.send(message)

        await cluster.until(lambda: cluster.has_ended(0))
        assert cluster.tokens[0] == tokens(3, LONG)
        await until(lambda: placed.is_serving)

    check(scenario)


def shared_prefix_prompts(count: int, prefixes: int) -> list[list[int]]:
    choice = random.Random(7)
    heads = [[choice.randrange(100, 900) for _ in range(256)] for _ in range(prefixes)]
    return [heads[choice.randrange(prefixes)] + [1000 + number] * 5 for number in range(count)]


async def total_hits(cluster: LocalCluster, prompts: list[list[int]], at_once: int = 4) -> int:
    for begin in range(0, len(prompts), at_once):
        batch = range(begin, min(begin + at_once, len(prompts)))
        for req_id in batch:
            cluster.send(req_id, prompts[req_id], 3)
        await cluster.until(lambda batch=batch: cluster.has_ended(*batch))  # type: ignore[misc]
    return sum(cluster.cached_tokens.values())


def test_requests_go_where_their_prefix_is_cached() -> None:
    prompts = shared_prefix_prompts(200, prefixes=12)
    hits: dict[str, int] = {}

    async def one(cluster: LocalCluster) -> None:
        hits["one"] = await total_hits(cluster, prompts)

    async def three(cluster: LocalCluster) -> None:
        hits["three"] = await total_hits(cluster, prompts)
        assert cluster.dispatcher.metrics.values["dp_prefix_missed_tokens_total"] == 0
        sent = [engine.manager.metrics.values["prefix_cache_queries_total"] for engine in cluster.engines.values()]
        assert min(sent) > 0  # all of them work

    check(one, num_engines=1, pool=8192)
    check(three, num_engines=3, pool=8192)

    assert hits["three"] >= 0.9 * hits["one"]
    assert hits["one"] > 0.85 * 200 * 256


def test_the_index_has_exactly_what_the_caches_have_even_under_eviction() -> None:
    choice = random.Random(2)

    async def scenario(cluster: LocalCluster) -> None:
        for round_ in range(30):
            ids = range(4 * round_, 4 * round_ + 4)
            for req_id in ids:
                prompt = [choice.randrange(2)] * 64 * choice.randrange(5) + [choice.randrange(9)] * 70
                cluster.send(req_id, prompt, choice.randrange(1, 90))
            await cluster.until(lambda ids=ids: cluster.has_ended(*ids))  # type: ignore[misc]
        assert sum(engine.pool.num_evicted for engine in cluster.engines.values()) > 500

        for number, engine in cluster.engines.items():
            num_blocks = len(engine.cached_blocks._counts)
            assert cluster.placement.index.num_blocks(number) == num_blocks
            cluster.kill_workers(number)
            await until(lambda engine=engine: not engine.manager.steps.has_workers)  # type: ignore[misc]
            await until(lambda number=number: cluster.placement.index.num_blocks(number) == 0)  # type: ignore[misc]

    check(scenario, pool=1500)


def test_an_aborted_request_ends_in_its_engine_and_in_the_detokenizer() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, [5], LONG)
        await cluster.until(lambda: len(cluster.tokens[0]) > 2)
        placed = cluster.placement.engine_of(0)
        assert placed is not None
        manager = cluster.engines[placed.number].manager

        cluster.inbox.send(AbortReq(0, FinishReason.STOP))
        cluster.inbox.send(AbortReq(77))
        cluster.inbox.send(AbortByRequestId("some"))
        await cluster.until(lambda: cluster.aborted == [0] and bool(cluster.replies))

        assert cluster.replies == [AbortByRequestId("some")]
        await until(lambda: manager.metrics._ended["stop"] == 1)
        assert not placed.requests

    check(scenario)


def test_a_request_is_refused_only_if_the_queues_of_all_engines_are_full() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        for engine in cluster.engines.values():
            engine.model.may_run.clear()
        for req_id in range(40):
            cluster.send(req_id, [5], 2, seed=req_id)

        await cluster.until(lambda: bool(cluster.failed))
        assert [engine.scheduler.num_waiting for engine in cluster.engines.values()] == [2, 2]
        assert next(iter(cluster.failed.values())).status == 429
        for engine in cluster.engines.values():
            engine.model.may_run.set()
        await cluster.until(lambda: sum(cluster.ended.values()) == 40)

        def refused() -> float:
            return 0.0 if cluster.stats is None else cluster.stats.metrics.values["request_refused_total"]

        await cluster.until(lambda: refused() == len(cluster.failed))
        assert all(len(cluster.tokens[req_id]) == 2 for req_id in range(40) if req_id not in cluster.failed)

    check(scenario, config=RouterConfig(max_queue_size=2), policy="round_robin")


def test_deadlines_count_from_the_arrival_of_the_http_request() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        for engine in cluster.engines.values():
            engine.model.may_run.clear()
        cluster.send(0, [5], 9, arrived_s=time.monotonic() - 9, scheduling=SchedulingParams(timeout_s=100))
        cluster.send(1, [5], 9, arrived_s=time.monotonic() - 9, scheduling=SchedulingParams(timeout_s=6))

        await cluster.until(lambda: cluster.has_ended(1))

        assert cluster.failed[1].status == 504
        for engine in cluster.engines.values():
            engine.model.may_run.set()
        await cluster.until(lambda: cluster.has_ended(0))
        assert len(cluster.tokens[0]) == 9

    check(scenario)


def test_a_request_of_another_gateway_goes_on_after_its_tokens_whatever_dies() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        params = GenerationParams.of(max_new_tokens=LONG, seed=7)
        cluster.inbox.send(GenerateReq(0, [5, 6], params, time.monotonic()))
        await cluster.until(lambda: cluster.has_ended(0))
        sent_ids = cluster.tokens[0][:5]

        cluster.inbox.send(ContinueReq(GenerateReq(1, [5, 6], params, time.monotonic()), sent_ids))
        await cluster.until(lambda: len(cluster.tokens[1]) > 2)
        placed = cluster.placement.engine_of(1)
        assert placed is not None
        cluster.kill_router(placed.number)
        await cluster.until(lambda: cluster.has_ended(1))

        assert sent_ids + cluster.tokens[1] == cluster.tokens[0]

    check(scenario, pool=16384)


@pytest.mark.parametrize("policy", ["prefix", "round_robin"])
def test_a_request_continues_its_parent_in_any_engine(policy: str) -> None:
    """The dispatcher knows the whole prompt. An engine that had the parent sends its workers only what follows."""

    async def scenario(cluster: LocalCluster) -> None:
        group = {"group": 100, "is_group_open": True}
        cluster.send(0, [5] * 200, 1, seed=0, **group)
        await cluster.until(lambda: cluster.has_ended(0))
        for req_id in range(1, 5):
            cluster.send(req_id, [6], 1, seed=req_id, parent=req_id - 1, **group)
            await cluster.until(partial(cluster.has_ended, req_id))
        entered = {new.req_id: new for engine in cluster.engines.values() for new in engine.model.entered}
        lengths = [new.num_uncomputed + new.num_cached for _, new in sorted(entered.items())]
        cluster.send(9, [6], 1, parent=77)
        await cluster.until(lambda: cluster.has_ended(9))
        cluster.inbox.send(ReleaseParents([0, 1, 2, 3, 4]))

        assert lengths == [200, 201, 202, 203, 204]
        assert [cluster.tokens[req_id] for req_id in range(5)] == [tokens(req_id, 1) for req_id in range(5)]
        if policy == "prefix":  # all are in the engine that has the prefix
            assert all(len(entered[req_id].token_ids) == 1 for req_id in range(1, 5))
        assert (cluster.failed[9].status, cluster.failed[9].message) == (
            500,
            "the request continues 77, which is not known",
        )
        await until(
            lambda: not any(len(engine.scheduler.only_group.fork_points) for engine in cluster.engines.values())
        )
        assert not cluster.dispatcher._prompts

    check(scenario, policy=policy)


def test_the_requests_of_an_http_process_that_died_end_in_all_engines() -> None:
    second = 1 << REQ_ID_BITS  # the first id of the second HTTP process

    async def scenario(cluster: LocalCluster) -> None:
        lost = [second | number for number in range(4)]
        for req_id in (0, *lost):
            cluster.send(req_id, [5 + req_id % 7], LONG if req_id else 40, seed=1)
        cluster.send(second | 9, [5], 1, seed=1, group=second | 9, is_group_open=True)
        await cluster.until(lambda: cluster.has_ended(second | 9) and all(len(cluster.tokens[one]) > 2 for one in lost))

        cluster.dispatcher.abort_http_process(HttpProcessLost(1, successor=3))
        cluster.send(second | 10, [5], 1)  # it was on its way
        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.tokens[0] == tokens(1, 40)
        assert sorted(cluster.aborted) == lost
        assert not cluster.announced[second | 10]
        engines = cluster.engines.values()
        await until(
            lambda: all(
                engine.pool.used == 0 and not len(engine.scheduler.only_group.fork_points) for engine in engines
            )
        )
        assert not cluster.dispatcher._prompts
        assert cluster.dispatcher.metrics.values["http_process_restarts_total"] == 1

    check(scenario)


def test_queries_are_answered_by_all_engines_together() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        now_s = time.monotonic()
        for req_id in range(4):
            cluster.send(req_id, [5], 3, request_id=f"r{req_id}", seed=1, arrived_s=now_s - 10 + req_id)
        cluster.send(9, [5], LONG, request_id="moved", seed=1, arrived_s=now_s)
        await cluster.until(lambda: cluster.has_ended(0, 1, 2, 3) and len(cluster.tokens[9]) > 2)
        placed = cluster.placement.engine_of(9)
        assert placed is not None
        cluster.kill_workers(placed.number)
        await cluster.until(lambda: cluster.has_ended(9))

        cluster.inbox.send(GetTimelines(1, None, 3))
        cluster.inbox.send(GetTimelines(2, "moved", 10))
        cluster.inbox.send(StartProfile(3, 1.0))
        cluster.inbox.send(SpanCounts(5, 2))
        await cluster.until(lambda: len(cluster.replies) == 3)

        last, moved, profile = sorted(cluster.replies, key=lambda reply: reply.query_id)
        assert isinstance(last, Timelines)
        assert isinstance(moved, Timelines)
        assert [one.req_id for one in last.timelines] == [9, 3, 2]
        kinds = [event.kind for event in moved.timelines[0].events]
        assert len(moved.timelines) == 1
        assert kinds[-1] == "finished"
        assert kinds.index("moved") < kinds.index("queued", 2)
        assert isinstance(profile, ProfileReply)
        assert profile.status == 400
        assert profile.message.startswith("engine 0: profiles are off")
        await cluster.until(
            lambda: cluster.stats is not None and cluster.stats.metrics.values["otlp_spans_exported_total"] == 5
        )

    check(scenario, pool=16384)


def test_metrics_are_sums_and_survive_the_engines_that_counted_them() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        for req_id in range(6):
            cluster.send(req_id, [5] * 10, 4)
        await cluster.until(lambda: cluster.has_ended(*range(6)))

        def value(name: str) -> float:
            return 0.0 if cluster.stats is None else cluster.stats.metrics.values[name]

        await cluster.until(lambda: value("generation_tokens_total") == 24)
        cluster.kill_router(0)
        cluster.start(0)
        await cluster.until(lambda: value("dp_engine_restarts_total") == 1)

        assert cluster.stats is not None
        assert value("generation_tokens_total") == 24
        assert value("prompt_tokens_total") == 60
        assert sum(cluster.stats.metrics.histograms["e2e_request_latency_seconds"].counts) == 6
        assert cluster.stats.metrics.labelled["request_success_total"]["length"] == 6
        await cluster.until(lambda: cluster.stats.metrics.labelled["dp_engine_serving"] == {"0": 1.0, "1": 1.0})  # type: ignore[union-attr]

    check(scenario)
