"""Pinned prefixes are computed once, never evicted, and computed again by new workers."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.errors import OptionError
from lightserve.messages.control import EngineInfo, KvGroupSize, SlidingWindowKv, StateKv
from lightserve.messages.params import GenerationParams
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import Step, StepRow, Token, TokenOut
from lightserve.router.kv.group_pools import make_group_pools
from lightserve.router.kv.pool import KvPool
from lightserve.router.pinned_prefixes import PinnedPrefixes, check_room
from lightserve.router.req import Req
from lightserve.router.scheduler import GroupScheduler, Scheduler, SchedulerLimits
from test.router.processing import process_tokens

PROMPTS = {"a": list(range(10, 30)), "b": [*range(10, 20), *range(50, 60)]}  # 10 tokens in common
SALT = "salt "


def make_req(message: GenerateReq) -> Req:
    req = Req(message.req_id, message.prompt_ids, message.params, 1, (), salt=message.prefix_salt(True))
    req.is_internal = True
    return req


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(GroupScheduler(KvPool(100), SchedulerLimits(4, 64, 64)))


def rows_of(step: Step) -> list[StepRow]:
    return [row for group_step in step.groups or [step] for row in group_step.rows]


def serve(scheduler: Scheduler, pinned: PinnedPrefixes | None = None) -> int:
    """Run until nothing is left. Returns the tokens that were computed."""
    tokens = 0
    while (step := scheduler.next_step()) is not None:
        tokens += step.num_tokens
        for req in process_tokens(scheduler, [TokenOut(row.req_id, Token(9)) for row in rows_of(step)]):
            if pinned is not None and req.is_internal:
                pinned.end(req)
    return tokens


def ask(scheduler: Scheduler, req_id: int, ids: list[int]) -> Req:
    params = GenerationParams.of(max_new_tokens=1, seed=0)
    req = Req(req_id, np.array(ids, dtype=np.int32), params, 1, (), salt=SALT)
    scheduler.add(req)
    return req


def test_prompts_are_computed_once_and_pinned(scheduler: Scheduler) -> None:
    pinned = PinnedPrefixes(scheduler, PROMPTS)

    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)
    pinned.compute(make_req, 0.0)

    assert scheduler.num_waiting == 0, "nothing is computed again"
    assert scheduler.only_group.pool.pinned_tokens == scheduler.only_group.pool.used == 30
    assert scheduler.only_group.pool.cached_tokens == 0


GROUPS: dict[str, list[KvGroupSize]] = {
    "window": [SlidingWindowKv(120, 16, 36)],
    "states": [StateKv(8)],
    "window and states": [SlidingWindowKv(120, 16, 36), StateKv(8)],
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_continues_a_pinned_prompt_stays_in_the_pools_of_groups_too(name: str) -> None:
    pool = KvPool(400, make_group_pools(GROUPS[name], 400))
    scheduler = Scheduler(GroupScheduler(pool, SchedulerLimits(4, 64, 64)))
    pinned = PinnedPrefixes(scheduler, PROMPTS)
    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)
    held = [group.used for group in pool.groups]
    for number in range(30):  # each needs most of a group's pool
        ask(scheduler, number, list(range(100 * number + 100, 100 * number + 190)))
        serve(scheduler)

    req = ask(scheduler, 99, [*PROMPTS["b"], 5, 6, 7])
    serve(scheduler)

    assert req.cached_len == len(PROMPTS["b"])
    assert all(held)
    assert [group.used for group in pool.groups] == held
    pool.reset()
    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)
    assert [group.used for group in pool.groups] == held


def test_pinned_prompts_that_leave_no_room_in_a_group_are_refused() -> None:
    for group in (SlidingWindowKv(90, 16, 36), StateKv(4)):
        with pytest.raises(OptionError, match="slots beside the KV pool"):
            check_room(PROMPTS, EngineInfo(1000, 200, 1000, 1, kv_groups=(group,)))


def test_nothing_evicts_a_pinned_prompt(scheduler: Scheduler) -> None:
    pinned = PinnedPrefixes(scheduler, PROMPTS)
    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)

    for number in range(10):  # more than the pool holds
        ask(scheduler, number, [1000 + number, *range(200, 240)])
        serve(scheduler)
    late = ask(scheduler, 99, [*PROMPTS["b"], 7, 8])
    serve(scheduler)

    assert scheduler.only_group.pool.num_evicted > 100
    assert late.cached_len == len(PROMPTS["b"])
    assert scheduler.only_group.pool.used == 30


@pytest.mark.parametrize("name", GROUPS)
def test_they_are_computed_again_beside_what_ran_on_the_old_ones(name: str) -> None:
    pool = KvPool(400, make_group_pools(GROUPS[name], 400))
    scheduler = Scheduler(GroupScheduler(pool, SchedulerLimits(4, 64, 64)))
    pinned = PinnedPrefixes(scheduler, PROMPTS)
    pinned.compute(make_req, 0.0)
    scheduler.next_step()
    pinned.recompute(make_req, 0.0)  # while they are computed
    serve(scheduler, pinned)
    held = [group.used for group in pool.groups]

    pinned.recompute(make_req, 0.0)

    assert (pool.pinned_tokens, pool.used) == (0, 0)
    assert not any(group.used for group in pool.groups)
    pool.clear_cache()
    assert pool.cached_tokens == 0
    serve(scheduler, pinned)
    assert pool.pinned_tokens == pool.used == 30
    assert [group.used for group in pool.groups] == held


def test_new_workers_compute_them_again(scheduler: Scheduler) -> None:
    pinned = PinnedPrefixes(scheduler, PROMPTS)
    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)

    scheduler.recover_from_crash()
    assert scheduler.only_group.pool.pinned_tokens == 0
    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)

    assert scheduler.only_group.pool.pinned_tokens == scheduler.only_group.pool.used == 30


def test_workers_that_die_meanwhile_compute_each_once(scheduler: Scheduler) -> None:
    pinned = PinnedPrefixes(scheduler, PROMPTS)
    pinned.compute(make_req, 0.0)
    scheduler.next_step()

    scheduler.recover_from_crash()
    pinned.compute(make_req, 0.0)

    assert scheduler.num_waiting == 2
    serve(scheduler, pinned)
    assert scheduler.only_group.pool.pinned_tokens == 30


def test_a_prompt_that_fails_is_not_tried_again(scheduler: Scheduler, caplog: pytest.LogCaptureFixture) -> None:
    pinned = PinnedPrefixes(scheduler, {"a": PROMPTS["a"]})
    pinned.compute(make_req, 0.0)
    scheduler.next_step()
    scheduler.recover_from_crash()
    (req,) = scheduler.drop(lambda _: True)

    pinned.end(req, has_failed=True)
    pinned.compute(make_req, 0.0)

    assert scheduler.num_waiting == 0


def test_every_attention_group_pins_all_prompts_and_new_workers_compute_them_again() -> None:
    scheduler = Scheduler(*(GroupScheduler(KvPool(100), SchedulerLimits(4, 64, 64)) for _ in range(3)))
    pinned = PinnedPrefixes(scheduler, PROMPTS)

    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)
    reqs = [ask(scheduler, number, [*PROMPTS["b"], 100 + number]) for number in range(6)]
    serve(scheduler)

    assert [group.pool.pinned_tokens for group in scheduler.groups] == [30] * 3
    assert [req.cached_len for req in reqs] == [len(PROMPTS["b"])] * 6
    scheduler.recover_from_crash()
    pinned.compute(make_req, 0.0)
    serve(scheduler, pinned)
    assert [group.pool.pinned_tokens for group in scheduler.groups] == [30] * 3


def engine(pool: int, longest: int) -> EngineInfo:
    return EngineInfo(pool, longest, vocab_size=100, pipeline_depth=1)


def test_pins_leave_room_for_requests() -> None:
    check_room(PROMPTS, engine(100, 60))
    check_room({}, engine(100, 100))
    with pytest.raises(OptionError, match="'a' has 20 tokens, and a request may have 21"):
        check_room(PROMPTS, engine(100, 21))
    with pytest.raises(OptionError, match="40 tokens would be pinned; the limit is 50% of the KV pool of 79"):
        check_room(PROMPTS, engine(79, 22))
    with pytest.raises(OptionError, match="set --max_req_total_len to 60 or less"):
        check_room(PROMPTS, engine(100, 61))
