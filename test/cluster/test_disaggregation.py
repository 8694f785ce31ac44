"""Prefill and decode engines: who computes a prompt, and that no failure loses a request or changes a token."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace as replace_struct

from lightserve.cluster.disaggregation import (
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    SAME_SERVER,
    KvExchange,
    choose_prefill,
    for_generation,
    for_prefill,
    rest_tokens,
    should_prefill_locally,
    timeout_s,
)
from lightserve.cluster.routing import EngineLoad, RoutedRequest, cost_s
from lightserve.messages.control import KvIdentity
from lightserve.messages.params import GenerationParams, SchedulingParams
from lightserve.messages.request import AbortReq, GenerateReq
from lightserve.router.kv.remote_prefill import RemoteKvSource
from test.cluster.local_cluster import MIN_REMOTE_PREFILL_TOKENS, LocalCluster
from test.cluster.test_dispatcher import LONG, break_something, check, tokens
from test.router.sources import source_of
from test.waiting import until

ROLES = ("prefill", "decode", "decode")
PREFILL, DECODE = 0, (1, 2)


class Named:
    def __init__(self, role: str) -> None:
        self.role = role


def test_prefill_engines_generate_only_if_no_other_is_left() -> None:
    prefill, decode, both, normal = Named("prefill"), Named("decode"), Named("both"), Named("normal")

    assert for_generation([prefill, decode, both, normal]) == [decode, both, normal]
    assert for_generation([prefill]) == [prefill]
    assert for_prefill([prefill, decode, both, normal]) == [prefill, both]
    assert for_prefill([decode]) == []


def load(engine: int, **values: float) -> EngineLoad:
    return EngineLoad(engine, **({"prefill_tokens_s": 1000.0} | values))  # type: ignore[arg-type]


def test_the_prefill_engine_that_is_done_first_is_chosen() -> None:
    request = RoutedRequest(2000, cached_tokens={2: 1500})
    engines = [load(1), load(2), load(3, waiting_tokens=5000)]

    assert choose_prefill(request, load(0), engines, 256) == engines[1]
    assert choose_prefill(request, load(0), [engines[0], engines[2]], 256) == engines[0]


@pytest.mark.parametrize(
    ("prompt_len", "cached", "is_remote"),
    [
        (2000, 0, True),
        (255, 0, False),  # short
        (2000, 1800, False),  # most of it is cached on the decode engine
        (2000, 1700, True),
    ],
)
def test_a_prompt_is_sent_only_if_enough_of_it_is_missing(prompt_len: int, cached: int, is_remote: bool) -> None:
    request = RoutedRequest(prompt_len, cached_tokens={0: cached})

    chosen = choose_prefill(request, load(0), [load(1)], 256)

    assert (chosen is not None) == is_remote
    assert choose_prefill(request, load(0), [], 256) is None


@pytest.mark.parametrize(
    ("queued_s", "running", "decode_s", "is_local"),
    [
        (0.0, 0, 0.0, False),
        (0.4, 0, 0.0, False),  # nobody runs there, but the wait is short
        (0.6, 0, 0.0, True),
        (2.4, 1, 0.0, False),  # one stream would be delayed by 2 s
        (2.6, 1, 0.0, True),
        (4.4, 2, 0.0, False),
        (4.6, 50, 0.0, True),  # no more than two streams count
        (8.0, 50, 3.6, False),  # the decode engine has prompts to compute too
    ],
)
def test_a_decode_engine_prefills_locally_if_the_prefill_engine_is_much_later(
    queued_s: float, running: int, decode_s: float, is_local: bool
) -> None:
    """1,000 tokens take a second. The prompt takes two."""
    decode = load(0, running=running, waiting_tokens=int(1000 * decode_s))

    assert should_prefill_locally(RoutedRequest(2000), decode, load(1, waiting_tokens=int(1000 * queued_s))) == is_local


def test_an_idle_prefill_engine_gets_a_prompt_though_it_was_slow() -> None:
    """A pause of a second would keep it without prompts for ever, and nobody would measure it again."""
    assert not should_prefill_locally(RoutedRequest(2000), load(0), load(1, prefill_tokens_s=10.0))
    assert should_prefill_locally(RoutedRequest(2000), load(0), load(1, prefill_tokens_s=10.0, waiting_tokens=1))


engine_loads = st.builds(
    EngineLoad,
    st.just(0),
    waiting_tokens=st.integers(0, 10**6),
    running=st.integers(0, 500),
    prefill_tokens_s=st.floats(10, 10**6),
)


@given(engine_loads, engine_loads, st.integers(1, 10**5), st.integers(0, 10**6))
def test_only_a_prefill_engine_that_is_later_is_bypassed_and_all_the_more_the_longer_its_queue_is(
    decode: EngineLoad, prefill: EngineLoad, prompt_len: int, more: int
) -> None:
    request = RoutedRequest(prompt_len)

    is_local = should_prefill_locally(request, decode, prefill)
    longer = replace(prefill, waiting_tokens=prefill.waiting_tokens + more)
    busier = replace(decode, waiting_tokens=decode.waiting_tokens + more)

    assert not is_local or cost_s(request, prefill) > cost_s(request, decode)
    assert should_prefill_locally(request, decode, longer) >= is_local
    assert should_prefill_locally(request, busier, prefill) <= is_local


@pytest.mark.parametrize(("known", "rest"), [(1, 1), (64, 64), (65, 1), (1000, 40), (1024, 64)])
def test_a_decode_engine_computes_what_is_after_the_last_whole_block(known: int, rest: int) -> None:
    assert rest_tokens(known) == rest


def test_a_transfer_waits_for_a_multiple_of_the_expected_time_within_limits() -> None:
    assert timeout_s(RoutedRequest(1), load(1)) == pytest.approx(MIN_TIMEOUT_S, rel=0.01)
    assert timeout_s(RoutedRequest(2000), load(1)) == MIN_TIMEOUT_S + 8
    assert timeout_s(RoutedRequest(1), load(1, waiting_tokens=10**6)) == MAX_TIMEOUT_S


@pytest.mark.parametrize("seed", range(6))
def test_random_failures_lose_no_request_and_change_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.cluster.dispatcher.MAX_CRASHES", 1000)  # none of them is a request's fault
    monkeypatch.setattr("lightserve.cluster.disaggregation.MIN_TIMEOUT_S", 0.3)
    choice = random.Random(seed)

    async def scenario(cluster: LocalCluster) -> None:
        lengths: dict[int, int] = {}
        aborted: set[int] = set()
        for req_id in range(60):
            lengths[req_id] = choice.randrange(1, 30)
            prompt = [choice.randrange(3)] * choice.randrange(1, 300)
            cluster.send(req_id, [*prompt, req_id % 5] * choice.randrange(1, 3), lengths[req_id], seed=req_id)
            if choice.random() < 0.3:
                await turns(choice.randrange(30))
                break_something(cluster, choice)
            if choice.random() < 0.1:
                aborted.add(req_id)
                cluster.inbox.send(AbortReq(req_id))
        for number in range(3):
            if number not in cluster.engines:
                cluster.start(number)
            elif not cluster.engines[number].manager.steps.has_workers:
                cluster.replace_workers(number)

        await cluster.until(lambda: cluster.has_ended(*(lengths.keys() - aborted)))

        assert not cluster.failed
        for req_id in lengths.keys() - aborted:
            assert cluster.ended[req_id] == 1
            assert cluster.tokens[req_id] == tokens(req_id, lengths[req_id])
        await until(lambda: all(engine.pool.used == 0 for engine in cluster.engines.values()))
        await until(lambda: not cluster.dispatcher._jobs._engine_of)
        loads = [engine.load for engine in cluster.placement]
        assert {(one.open_requests, one.waiting_tokens, one.running) for one in loads} == {(0, 0, 0)}
        for number in DECODE:
            remote_kv = remote_kv_of(cluster, number)
            assert [*remote_kv._open, *remote_kv._transfer_of] == []
            assert remote_kv.num_recomputed == 0

    check(scenario, num_engines=3, roles=ROLES)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def remote_kv_of(cluster: LocalCluster, number: int) -> RemoteKvSource:
    remote_kv = source_of(cluster.engines[number].scheduler, RemoteKvSource)
    assert remote_kv is not None
    return remote_kv


def received(cluster: LocalCluster) -> int:
    return sum(remote_kv_of(cluster, number).num_received for number in DECODE if number in cluster.engines)


def test_a_decode_engine_computes_the_last_tokens_only() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, list(range(1000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.tokens[0] == tokens(1, 5)
        assert cluster.cached_tokens[0] == received(cluster) == 960
        assert cluster.engines[PREFILL].scheduler.only_group.sends.num_sent == 960
        assert cluster.engines[PREFILL].manager.metrics.values["generation_tokens_total"] == 0  # nobody asked for it
        engine = next(one for number, one in cluster.engines.items() if one.pool.cached_tokens and number != PREFILL)
        await cluster.until(lambda: cluster.stats is not None)
        index = cluster.placement.index
        assert max(index.num_blocks(number) for number in DECODE) == 15  # it may be found by the next request
        assert engine.pool.used == 0

    check(scenario, num_engines=3, roles=ROLES)


def load_of(cluster: LocalCluster, number: int) -> EngineLoad:
    engine = cluster.placement.get(number)
    assert engine is not None
    return engine.load


def test_a_prompt_is_work_of_the_engine_that_computes_it() -> None:
    """First the prefill engine. When that is lost, the decode engine."""

    async def scenario(cluster: LocalCluster) -> None:
        for engine in cluster.engines.values():
            engine.model.may_run.clear()
        cluster.send(0, list(range(1000)), 5, seed=1)
        cluster.engines[1].model.may_run.set()  # the step that tells its workers to expect KV
        await until(lambda: bool(cluster.engines[PREFILL].model.steps))

        assert load_of(cluster, PREFILL).waiting_tokens == 960
        assert (load_of(cluster, 1).waiting_tokens, load_of(cluster, 1).running) == (40, 1)
        cluster.engines[1].model.may_run.clear()
        cluster.kill_router(PREFILL)
        assert (load_of(cluster, 1).waiting_tokens, load_of(cluster, 1).running) == (1000, 0)
        cluster.engines[1].model.may_run.set()
        await cluster.until(lambda: cluster.has_ended(0))
        assert (load_of(cluster, 1).waiting_tokens, load_of(cluster, 1).open_requests) == (0, 0)

    check(scenario, num_engines=2, roles=("prefill", "decode"))


def test_decode_engines_compute_prompts_of_a_prefill_engine_whose_queue_is_long() -> None:
    """The prefill engine hangs. Whoever would wait there too long is computed at once."""

    async def scenario(cluster: LocalCluster) -> None:
        cluster.engines[PREFILL].model.may_run.clear()
        for req_id in range(30):
            cluster.send(req_id, [req_id] * 1000, 5, seed=req_id)
        await cluster.until(lambda: sum(cluster.ended.values()) > 0)
        waiting = load_of(cluster, PREFILL)
        assert 0 < waiting.open_requests < 30
        cluster.engines[PREFILL].model.may_run.set()
        await cluster.until(lambda: cluster.has_ended(*range(30)))

        local_tokens = cluster.placement.local_prefill_tokens
        assert [cluster.tokens[req_id] for req_id in range(30)] == [tokens(req_id, 5) for req_id in range(30)]
        assert local_tokens > 0
        assert (
            received(cluster)
            == cluster.engines[PREFILL].scheduler.only_group.sends.num_sent
            == (30 - local_tokens // 1000) * 960
        )
        assert sum(remote_kv_of(cluster, number).num_given_up for number in DECODE) == 0, "nobody had promised it"
        cluster.dispatcher._send_heartbeat()
        await cluster.until(
            lambda: (
                cluster.stats is not None
                and cluster.stats.metrics.values["kv_transfer_local_prefill_tokens_total"] == local_tokens
            )
        )

    check(scenario, num_engines=3, roles=ROLES, pool=40_000)


def test_requests_that_wait_for_kv_do_not_wait_for_the_decode_engine() -> None:
    """Who counts the engines that a role needs sees a queue of the prefill engine only."""

    async def scenario(cluster: LocalCluster) -> None:
        cluster.engines[PREFILL].model.may_run.clear()
        for req_id in range(2):
            cluster.send(req_id, [req_id] * 1000, 5, seed=req_id)

        def loads() -> tuple[float, dict[str, float], dict[str, float]]:
            found = None if cluster.stats is None else cluster.stats.metrics
            if found is None:
                return 0.0, {}, {}
            waiting, usage = found.labelled["role_requests_waiting"], found.labelled["role_kv_cache_usage_perc"]
            return found.values["kv_transfer_requests_waiting"], waiting, usage

        await cluster.until(lambda: loads()[0] == 2)
        _, waiting, usage = loads()
        assert waiting["decode"] == 0
        assert usage["decode"] > 0, "their slots are reserved"
        assert set(waiting) == set(usage) == {"prefill", "decode"}
        cluster.engines[PREFILL].model.may_run.set()
        await cluster.until(lambda: cluster.has_ended(0, 1) and loads()[0] == 0)

    check(scenario, num_engines=3, roles=ROLES)


def test_kv_that_came_does_not_show_how_fast_the_decode_engine_is() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, list(range(1000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(0))
        prefill = load_of(cluster, PREFILL).prefill_tokens_s
        assert received(cluster) == 960

        assert [load_of(cluster, number).prefill_tokens_s for number in DECODE] == [prefill, prefill], "no own rate"

    check(scenario, num_engines=3, roles=ROLES)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": [7] * (MIN_REMOTE_PREFILL_TOKENS - 1)},
        {"prompt": [7] * 500, "scheduling": SchedulingParams(use_cache=False)},
    ],
)
def test_what_would_not_pay_or_cannot_be_shared_stays_on_the_decode_engine(options: dict[str, object]) -> None:
    async def scenario(cluster: LocalCluster) -> None:
        prompt: list[int] = options.pop("prompt")  # type: ignore[assignment]
        cluster.send(0, prompt, 5, seed=1, **options)
        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.tokens[0] == tokens(1, 5)
        assert not cluster.engines[PREFILL].model.steps

    check(scenario, num_engines=3, roles=ROLES)


def test_prompts_stay_on_the_decode_engine_while_a_trainer_replaces_weights() -> None:
    """The prefill engine may still have those of before."""

    async def scenario(cluster: LocalCluster) -> None:
        cluster.dispatcher.training.set_updating(True)
        cluster.send(0, list(range(1000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(0))
        assert not cluster.engines[PREFILL].model.steps

        cluster.dispatcher.training.set_updating(False)
        cluster.send(1, list(range(2000, 3000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(1))
        assert cluster.engines[PREFILL].model.steps

    check(scenario, num_engines=3, roles=ROLES)


def test_a_prompt_that_is_cached_on_the_decode_engine_makes_no_trip() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, list(range(1000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(0))
        cluster.send(1, list(range(1000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(1))

        assert cluster.engines[PREFILL].scheduler.only_group.sends.num_sent == 960
        assert cluster.cached_tokens[1] == 999

    check(scenario, num_engines=3, roles=ROLES)


def test_requests_with_the_same_prompt_wait_for_the_same_kv() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.engines[PREFILL].model.may_run.clear()
        for req_id in range(2):
            cluster.send(req_id, list(range(1000)), 5, seed=req_id, group=0)
        await until(lambda: bool(cluster.engines[PREFILL].model.steps))
        cluster.engines[PREFILL].model.may_run.set()
        await cluster.until(lambda: cluster.has_ended(0, 1))

        assert cluster.cached_tokens[0] >= 960
        assert cluster.cached_tokens[1] >= 960
        assert [cluster.tokens[req_id] for req_id in range(2)] == [tokens(0, 5), tokens(1, 5)]

    check(scenario, num_engines=2, roles=("prefill", "decode"))


KV = KvIdentity(1, 1, "1", "a model", "in float32", "a layout")
CUT = replace_struct(KV, is_divisible=True)


@pytest.mark.parametrize(
    ("decode", "prefill", "found"),
    [
        (KvExchange(KV, "sockets"), KvExchange(KV, "sockets"), None),
        (KvExchange(KV, "sockets"), KvExchange(replace_struct(KV, tp=2), "sockets"), "--tp is 1 and 2"),
        (KvExchange(KV, "sockets"), KvExchange(replace_struct(KV, pp=2), "sockets"), "--pp is 1 and 2"),
        (KvExchange(KV, "sockets"), KvExchange(replace_struct(KV, version="2"), "sockets"), "version is 1 and 2"),
        (KvExchange(KV, "sockets"), KvExchange(KV, "nixl"), "--kv_transport is sockets and nixl"),
        (KvExchange(KV, ""), KvExchange(None, ""), "--tp is 1 and None"),
        (SAME_SERVER, SAME_SERVER, None),
        (KvExchange(CUT, ""), KvExchange(replace_struct(CUT, tp=2), ""), None),
        (KvExchange(CUT, ""), KvExchange(replace_struct(CUT, tp=3), ""), "--tp is 1 and 3"),
        (KvExchange(CUT, ""), KvExchange(replace_struct(CUT, tp=2, layout="another"), ""), "layout is a lay.*another"),
    ],
)
def test_engines_say_in_what_they_differ(decode: KvExchange, prefill: KvExchange, found: str | None) -> None:
    difference = decode.difference(prefill)

    assert difference is None if found is None else re.fullmatch(found, difference or "")
    assert decode.fits(prefill) == prefill.fits(decode) == (found is None)


def test_an_engine_with_another_layout_gets_no_prompts_of_a_decode_engine(log: pytest.LogCaptureFixture) -> None:
    """Its KV would not fit. The decode engine waits for nothing."""
    other = KvExchange(replace_struct(KV, tp=2), "sockets")

    async def scenario(cluster: LocalCluster) -> None:
        cluster.kv_exchanges = dict.fromkeys(range(4), KvExchange(KV, "sockets")) | {0: other}
        for number in range(4):
            cluster.kill_router(number)
            cluster.start(number)
        for req_id in range(4):
            cluster.send(req_id, [req_id] * 1000, 5, seed=req_id)
        await cluster.until(lambda: cluster.has_ended(*range(4)))
        assert not cluster.engines[0].model.steps
        assert cluster.engines[1].scheduler.only_group.sends.num_sent == 4 * 960

        cluster.kill_router(1)
        cluster.send(4, [4] * 1000, 5, seed=4)
        await cluster.until(lambda: cluster.has_ended(4))
        assert not cluster.engines[0].model.steps
        assert [cluster.tokens[req_id] for req_id in range(5)] == [tokens(req_id, 5) for req_id in range(5)]
        assert sum(remote_kv_of(cluster, number).num_wanted for number in (2, 3)) == 4 * 960, "it did not wait"

    check(scenario, num_engines=4, roles=("prefill", "prefill", "decode", "decode"))

    warnings = [record.getMessage() for record in log.records if "gets no KV" in record.getMessage()]
    assert [text for text in warnings if "engine 2 (decode)" in text and "--tp is 1 and 2" in text] == [
        "engine 2 (decode) gets no KV from engine 0 (prefill), and computes prompts itself: --tp is 1 and 2"
    ]


def test_a_lost_prefill_engine_is_noticed_at_once() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.engines[PREFILL].model.may_run.clear()
        cluster.send(0, list(range(1000)), 5, seed=1)
        await until(lambda: bool(cluster.engines[PREFILL].model.steps))

        cluster.kill_router(PREFILL)
        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.tokens[0] == tokens(1, 5)
        assert received(cluster) == 0
        cluster.start(PREFILL)
        cluster.send(1, list(range(500, 1500)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(1))
        assert received(cluster) == 960

    check(scenario, num_engines=3, roles=ROLES)


def test_engines_that_cannot_reach_each_other_are_left_alone_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.cluster.disaggregation.MIN_TIMEOUT_S", 0.1)

    async def scenario(cluster: LocalCluster) -> None:
        monkeypatch.setattr("test.cluster.local_cluster.FakeKvReceiver.arrive", lambda *_: None)
        cluster.send(0, list(range(1000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(0))
        sent = cluster.engines[PREFILL].scheduler.only_group.sends.num_sent
        assert sent == 960
        assert load_of(cluster, 1).waiting_tokens == load_of(cluster, 1).open_requests == 0
        cluster.send(1, list(range(500, 1500)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(1))

        assert cluster.tokens[0] == cluster.tokens[1] == tokens(1, 5)
        assert cluster.engines[PREFILL].scheduler.only_group.sends.num_sent == sent

    check(scenario, num_engines=2, roles=("prefill", "decode"))


def test_decode_engines_that_are_all_lost_are_replaced_by_the_prefill_engine() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        cluster.send(0, list(range(1000)), LONG, seed=1)
        await cluster.until(lambda: len(cluster.tokens[0]) > 3)

        for number in DECODE:
            cluster.kill_router(number)
        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.tokens[0] == tokens(1, LONG)

    check(scenario, num_engines=3, roles=ROLES)


def test_an_engine_of_both_roles_generates_and_computes_prompts_for_others() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        for req_id in range(8):
            cluster.send(req_id, [req_id] * 1000, 5, seed=req_id)
        await cluster.until(lambda: cluster.has_ended(*range(8)))

        assert [cluster.tokens[req_id] for req_id in range(8)] == [tokens(req_id, 5) for req_id in range(8)]
        both = cluster.engines[0]
        assert both.scheduler.only_group.sends.num_sent == received(cluster) > 0
        assert both.manager.metrics.values["generation_tokens_total"] > 0

    check(scenario, num_engines=2, roles=("both", "decode"))


def test_a_queue_that_is_full_leaves_the_prompt_to_the_decode_engine() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        manager = cluster.engines[PREFILL].manager
        manager._queue_full_reason = lambda message: "full"  # type: ignore[method-assign]
        cluster.send(0, list(range(1000)), 5, seed=1)
        await cluster.until(lambda: cluster.has_ended(0))

        assert cluster.tokens[0] == tokens(1, 5)
        assert received(cluster) == 0

    check(scenario, num_engines=3, roles=ROLES)


def test_prompt_logprobs_are_computed_where_they_are_asked_for() -> None:
    async def scenario(cluster: LocalCluster) -> None:
        params = GenerationParams.of(max_new_tokens=5, seed=1, prompt_logprobs=1)
        cluster.inbox.send(GenerateReq(0, list(range(1000)), params, 0.0))
        await cluster.until(lambda: cluster.has_ended(0))

        assert not cluster.engines[PREFILL].model.steps

    check(scenario, num_engines=3, roles=ROLES)
