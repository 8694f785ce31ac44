"""Steps that only decode are planned many at once, and no figure may change by that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step, Token, TokenOut
from lightserve.router.kv.pool import KvPool
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from lightserve.simulate.decode_run import DecodeRunScheduler
from lightserve.simulate.gpu import H200, OTHER, CostModel
from lightserve.simulate.kv_tiers import Store, Tiers
from lightserve.simulate.kv_transfer import Split
from lightserve.simulate.load import Load, fixed, lognormal
from lightserve.simulate.replica import EndedStep, Replica, Setup
from lightserve.simulate.result import Result
from lightserve.simulate.simulation import Failure, Simulation, simulate
from test.router.processing import process_tokens

LOAD = Load(lognormal(30, 1.0, 300), lognormal(40, 1.0, 150), count=30, streams=6, max_new_tokens=150)
FLAT = CostModel(matmul_ms=((1, 10.0), (1000, 10.0)), bytes_per_s=float("inf"), pairs_per_s=float("inf"), rest_s=(0, 0))
LIMITS = SchedulerLimits(16, 512, 64, token_ratio=0.85)
RAM = Store("ram", 400 * H200.kv_bytes, 1e10, 0.0)
TIERS = Tiers(H200.kv_bytes, RAM, (Store("disk", 4000 * H200.kv_bytes, 1e9, 1e-3),))


def figures(result: Result) -> dict[str, object]:
    return {name: getattr(result, name) for name in Result.__dataclass_fields__ if name != "cpu_s"}


@settings(max_examples=10, deadline=None, derandomize=False, database=None, print_blob=True)
@given(
    pool_size=st.sampled_from([600, 1500, 100_000]),  # with preemptions, with evictions, with neither
    depth=st.integers(1, 3),
    lead_s=st.sampled_from([0.0, 3e-3, 1.0]),
    max_running=st.sampled_from([3, 16]),
    rate=st.sampled_from([None, 5.0, 40.0]),
    num_prefixes=st.sampled_from([0, 4]),
    failures=st.lists(st.builds(Failure, st.floats(0, 2), st.integers(0, 1), st.floats(0.01, 1.0)), max_size=3),
    seed=st.integers(0, 1000),
    tiers=st.sampled_from([None, TIERS, replace(TIERS, storage=())]),
)
def test_the_figures_are_those_of_steps_that_are_planned_one_by_one(  # noqa: PLR0913
    pool_size: int,
    depth: int,
    lead_s: float,
    max_running: int,
    rate: float | None,
    num_prefixes: int,
    failures: list[Failure],
    seed: int,
    tiers: Tiers | None,
) -> None:
    load = replace(LOAD, rate=rate, num_prefixes=num_prefixes, prefix_len=100 if num_prefixes else 0, seed=seed)
    limits = replace(LIMITS, max_running=max_running)
    setup = Setup("fifo", limits, pool_size=pool_size, depth=depth, lead_s=lead_s, tiers=tiers)

    skipped = simulate(setup, load, 2, "prefix", failures)
    planned = simulate(replace(setup, skips_planning=False), load, 2, "prefix", failures)

    assert figures(skipped) == figures(planned)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_figures_of_servers_with_roles_are_the_same_too(seed: int) -> None:
    load = replace(LOAD, prompt_len=lognormal(200, 1.0, 500), rate=15.0, num_prefixes=4, prefix_len=100, seed=seed)
    setup = Setup("fifo", LIMITS, pool_size=3000, tiers=TIERS)
    failures = [Failure(0.5, 2, 0.5), Failure(1.0, 0, 0.3)]
    split = Split(("prefill", "decode", "decode"), min_tokens=64)

    skipped = simulate(setup, load, 3, "prefix", failures, split)
    planned = simulate(replace(setup, skips_planning=False), load, 3, "prefix", failures, split)

    assert figures(skipped) == figures(planned)
    assert skipped.moved_tokens > 0


def test_the_simulation_looks_at_a_server_that_only_decodes_less_often_than_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[float] = []
    end_step = Replica.end_step

    def observed(replica: Replica, now: float) -> EndedStep | None:
        ends.append(now)
        return end_step(replica, now)

    monkeypatch.setattr(Replica, "end_step", observed)

    result = simulate(Setup(), replace(LOAD, streams=2, count=20))

    assert len(ends) < result.steps / 3


def test_the_times_of_decodes_are_those_of_single_steps() -> None:
    kv_read = np.arange(0, 100_000, 777)

    for rows in (1, 7, 300):
        assert H200.decode_s(rows, kv_read).tolist() == [H200.step_s(rows, each, 0.0) for each in kv_read.tolist()]


@pytest.mark.parametrize("tiers", [None, replace(TIERS, ram=replace(RAM, num_bytes=100 * RAM.num_bytes), storage=())])
def test_most_steps_of_a_few_streams_are_skipped(monkeypatch: pytest.MonkeyPatch, tiers: Tiers | None) -> None:
    times: list[float] = []
    plan = Scheduler.next_step

    def next_step(scheduler: Scheduler, now_s: float) -> Step | None:
        times.append(now_s)
        return plan(scheduler, now_s)

    monkeypatch.setattr(Scheduler, "next_step", next_step)

    result = simulate(Setup(tiers=tiers), replace(LOAD, streams=2, count=20))

    assert len(times) < result.steps / 10, "about one and a half for each request"


def test_replicas_hold_the_same_slots_either_way() -> None:
    load = replace(LOAD, count=30)
    runs = [Simulation(Setup(skips_planning=skips, pool_size=2000), load) for skips in (True, False)]

    for run in runs:
        run.run()

    (skipped, planned) = (run.replicas[0].scheduler.only_group.pool for run in runs)
    ids = next(iter(load.requests())).prompt_ids
    assert skipped._cache.find_slots(ids).tolist() == planned._cache.find_slots(ids).tolist() != []
    assert (skipped.used, skipped.cached_tokens) == (planned.used, planned.cached_tokens)


def test_steps_in_flight_go_on_one_by_one_after_a_run() -> None:
    """Of five decodes that are planned at once, three have ended when the run does."""
    scheduler = DecodeRunScheduler(GroupScheduler(KvPool(100), SchedulerLimits(4, 64, 64)))
    req = Req(7, np.arange(2, 10, dtype=np.int32), GenerationParams.of(max_new_tokens=50, seed=0), 50, (0,))
    scheduler.add(req)
    scheduler.next_step()
    process_tokens(scheduler, [TokenOut(7, Token(OTHER))])
    run = scheduler.begin_decodes()
    assert run is not None
    assert run.max_steps == 48, "the first of 50 tokens is there, and the last one ends the request"
    for _ in range(5):
        assert run.plan()

    scheduler.end_decodes(run, [OTHER] * 3, 1.5)

    assert (req.planned_len, req.certain_len, req.planned_outputs) == (13, 11, 6)
    assert len(req.slots) == len(set(req.slots.tolist())) == 13
    assert (req.output_len, req.last_token_s) == (4, 1.5)
    for certain in (12, 13):
        scheduler.complete_step()
        assert req.certain_len == certain
    step = scheduler.next_step()
    assert step is not None
    assert list(step.decode_ids) == [7]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(("arrived_s", "first_token_s"), [(0.049, 0.063), (0.051, 0.073)])
def test_a_step_is_planned_three_milliseconds_before_the_last_one_ends(
    skips: bool, arrived_s: float, first_token_s: float
) -> None:
    """Steps of 10 ms, the first at 3. One is planned at 50 and begins at 53: who comes later is in the next."""
    setup = Setup("fifo", SchedulerLimits(4, 64, 64), cost=FLAT, lead_s=3e-3, skips_planning=skips)
    replica = Replica(setup)
    params = GenerationParams.of(max_new_tokens=50, seed=0)
    first_tokens: dict[int, float] = {}

    def run_until(end_s: float) -> None:
        while replica.due_s <= end_s:
            now = replica.due_s
            ended = replica.end_step(now)
            assert ended is not None
            first_tokens.update({req.req_id: now for req in ended.others})
            replica.run(now)

    for req_id, at in ((0, 0.0), (1, arrived_s)):
        run_until(at)
        replica.add(Req(req_id, np.arange(2, 10, dtype=np.int32) + req_id, params, 50, (0,)), 40, at)
        replica.run(at)
    run_until(0.1)

    assert first_tokens == {0: pytest.approx(0.013), 1: pytest.approx(first_token_s)}


def test_nothing_is_skipped_while_a_request_could_start() -> None:
    scheduler = DecodeRunScheduler(GroupScheduler(KvPool(100), SchedulerLimits(4, 64, 64)))
    params = GenerationParams.of(max_new_tokens=50, seed=0)

    def add(req_id: int) -> None:
        scheduler.add(Req(req_id, np.arange(2, 10, dtype=np.int32) + req_id, params, 50, (0,)))

    assert scheduler.begin_decodes() is None, "nothing runs"
    add(1)
    assert scheduler.begin_decodes() is None, "a prompt waits"
    scheduler.next_step()
    assert scheduler.begin_decodes() is not None
    add(2)
    assert scheduler.begin_decodes() is None, "another one does"


def test_a_batch_that_only_computes_prompts_is_planned_step_by_step() -> None:
    load = Load(fixed(200), fixed(1), count=5, streams=1, max_new_tokens=1)

    result = simulate(Setup("fifo", SchedulerLimits(4, 64, 64)), load)

    assert result.steps >= 5 * 4
