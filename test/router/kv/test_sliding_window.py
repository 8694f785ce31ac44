"""The pool of sliding windows. The brute-force tests of test_scheduler.py run with and without it."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lightserve.messages.control import SlidingWindowKv
from lightserve.messages.params import FinishReason
from lightserve.messages.step import ReqFailed
from lightserve.router.kv.group_slots import GroupSlots, SlotQueue
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.router.kv.slots import Slots
from test.router.images.test_image_waits import item
from test.router.scheduler.test_scheduler import Server, fresh_histories, make, make_req, truth

WINDOW, KEPT = 8, 12


def windowed(size: int) -> SlidingWindowKv:
    return SlidingWindowKv(size, WINDOW, KEPT)


def prompt(length: int, first: int = 1000) -> list[int]:
    return list(range(first, first + length))


def run_of(*values: int) -> Slots:
    return np.array(values, dtype=np.int32)


def test_a_request_holds_only_the_slots_that_its_window_may_reach() -> None:
    server = Server(make(1000, windowed=windowed(100), batch_max_tokens=32))
    req = make_req(0, prompt(300), 100)
    req.eos_ids = ()
    server.scheduler.add(req)
    (pool,) = server.scheduler.only_group.pool.groups

    held = []
    while server.step():
        held.append(pool.used)

    assert max(held) == KEPT
    assert len(req.output_ids) == 100
    server.assert_idle()


def test_requests_far_longer_than_the_windowed_pool_run_at_once_and_none_is_preempted() -> None:
    server = Server(make(5000, windowed=windowed(16 * (KEPT + 1) + 64), max_running=16))
    reqs = [make_req(i, prompt(200, 1000 * i), 50) for i in range(16)]
    for req in reqs:
        req.eos_ids = ()

    server.run(reqs)

    assert max(map(len, server.steps)) == 16
    assert server.scheduler.num_preemptions == 0
    assert all(req.finish_reason is FinishReason.LENGTH for req in reqs)
    server.assert_idle()


def test_a_request_waits_if_the_windowed_pool_cannot_hold_its_window() -> None:
    server = Server(make(5000, windowed=windowed(3 * (KEPT + 1) + 32), max_running=16, batch_max_tokens=32))

    server.run([make_req(i, prompt(200, 1000 * i), 50) for i in range(8)])

    assert max(map(len, server.steps)) == 3
    assert server.scheduler.num_preemptions == 0
    server.assert_idle()


def test_a_prompt_is_computed_in_chunks_if_the_windowed_pool_cannot_hold_it_whole() -> None:
    server = Server(make(1000, windowed=windowed(KEPT + 40), batch_max_tokens=500, chunk_size=None))

    server.run([req := make_req(0, prompt(300), 5)])

    assert req.output_ids == truth(req.prompt_ids, 0, 5)
    assert len(server.steps) >= 300 // 40


def test_a_cached_prefix_is_used_while_the_end_of_it_has_its_slots() -> None:
    server = Server(make(1000, windowed=windowed(200)))
    server.run([make_req(0, prompt(100), 1)])

    for i, length in enumerate([100, 90, 50]):
        server.run([req := make_req(10 + i, [*prompt(length), 1, 2], 1)])
        assert req.cached_len == length


def test_a_prefix_that_lost_its_slots_is_computed_again_and_has_them_afterwards() -> None:
    server = Server(make(1000, windowed=windowed(50)))
    server.run([make_req(0, prompt(100), 1)])
    server.run([make_req(1, prompt(100, 5000), 1)])  # takes all slots of the windowed pool

    server.run([again := make_req(2, prompt(100), 1)])
    server.run([third := make_req(3, [*prompt(100), 1], 1)])

    assert again.cached_len == 0
    assert third.cached_len == 100
    server.assert_idle()


def test_other_requests_share_a_prefix_that_is_computed_again_before_its_request_ends() -> None:
    server = Server(make(1000, windowed=windowed(80)))
    server.run([make_req(0, prompt(60), 1)])
    server.run([make_req(1, prompt(100, 5000), 1)])
    first, second = make_req(2, prompt(60), 50), make_req(3, [*prompt(60), 1], 5)
    first.eos_ids = ()
    server.scheduler.add(first)
    server.step()

    server.scheduler.add(second)
    server.step()

    assert first.cached_len == 0
    assert second.cached_len == 60


def test_slots_that_a_failed_step_was_to_fill_are_not_used_by_cached_tokens() -> None:
    server = Server(make(1000, windowed=windowed(80)), depth=2)
    server.run([make_req(0, prompt(60), 1)])
    server.run([make_req(1, prompt(100, 5000), 1)])
    server.scheduler.add(make_req(2, prompt(60), 50))  # computes tokens again that are cached
    step = server.scheduler.next_step()
    assert step is not None
    server.launch(step)

    server.fail_steps()

    server.assert_idle()
    server.run([req := make_req(3, prompt(60), 5)])
    assert req.output_ids == truth(req.prompt_ids, 3, 5)
    assert req.cached_len == 0


def test_a_slot_that_two_failed_steps_were_to_fill_is_freed_once() -> None:
    """Both compute tokens again that are cached. The second takes slots of the first that no window reaches."""
    server = Server(make(1000, windowed=windowed(2 * KEPT), batch_max_tokens=KEPT), depth=4)
    server.run([make_req(0, prompt(100), 1)])
    server.run([make_req(1, prompt(100, 5000), 1)])
    server.scheduler.add(make_req(2, prompt(100), 50))
    server.step()
    slots = [slot for one in server._in_flight for slot in one.step.group_slots[0].tolist()]
    assert len(set(slots)) < len(slots)

    server.fail_steps()

    server.assert_idle()
    server.run([again := make_req(3, prompt(100), 5)])
    assert again.output_ids == truth(again.prompt_ids, 3, 5)


def test_cached_tokens_lose_the_slots_of_a_request_that_failed_with_nan() -> None:
    server = Server(make(1000, windowed=windowed(200)))
    other, failing = make_req(0, prompt(60), 40), make_req(1, [*prompt(60), 1], 40)
    other.eos_ids = ()
    server.scheduler.add(other)
    server.step()
    server.scheduler.add(failing)
    step = server.scheduler.next_step()
    assert step is not None
    server.launch(step)

    server.scheduler.fail(ReqFailed(1, 500, "numerical error"))

    assert server.scheduler.only_group.pool.cached_len(make_req(2, prompt(61))) == 0
    server.run([])
    assert len(other.output_ids) == 40
    server.assert_idle()


def test_a_preempted_request_continues_without_computing_its_tokens_again() -> None:
    server = Server(make(1000, windowed=windowed(100)))
    req = make_req(0, prompt(100), 50)
    req.eos_ids = ()
    server.scheduler.add(req)
    for _ in range(20):
        server.step()

    server.scheduler.only_group.preemption.preempt_newest()
    server.run([])

    assert server.worker.computed == 100 + 49  # the last output is never computed
    assert len(req.output_ids) == 50
    server.assert_idle()


def test_the_next_turn_of_a_chat_may_leave_out_the_last_tokens_of_the_answer() -> None:
    server = Server(make(1000, windowed=windowed(500)))
    first = make_req(0, prompt(50), 100)
    first.eos_ids = ()
    server.run([first])
    shared = [*first.prompt_ids, *first.output_ids[: -(KEPT - WINDOW)]]

    server.run([second := make_req(1, [*shared, 5000, 5001], 5)])

    assert second.cached_len == len(shared)


def brute_force_usable_len(has_slot: list[bool], window: int) -> int:
    def is_usable(length: int) -> bool:
        return all(has_slot[max(length - max(window - 1, 1), 0) : length])

    return max(length for length in range(len(has_slot) + 1) if is_usable(length))


@fresh_histories
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 10))
def test_a_prefix_is_usable_up_to_a_token_whose_window_has_all_slots(has_slot: list[bool], window: int) -> None:
    pool = SlidingWindowPool(SlidingWindowKv(30, window, window + 3), num_tokens=50)
    tokens = np.arange(10, 10 + len(has_slot), dtype=np.int32)
    cached = tokens[np.array(has_slot, dtype=bool)]
    pool.slots.add_cached(cached, pool.slots.alloc(len(cached)))

    assert pool.usable_len(tokens) == brute_force_usable_len(has_slot, window)


def test_the_slots_that_were_freed_first_are_evicted_first() -> None:
    pool = GroupSlots(6, num_tokens=20)
    slots = pool.alloc(6)
    pool.add_cached(np.arange(6, dtype=np.int32), slots)
    for slot in (slots[3], slots[0], slots[5]):
        pool.free(run_of(slot))
    pool.hold(run_of(0))

    assert pool.alloc(1) == [slots[3]]
    assert pool.alloc(1) == [slots[5]]
    assert pool.available == 0
    assert pool.has_slot(np.arange(6, dtype=np.int32)).tolist() == [True, True, True, False, True, False]


def test_a_slot_is_free_when_its_last_request_frees_it_unless_it_is_cached() -> None:
    pool = GroupSlots(4, num_tokens=20)
    private, cached = pool.alloc(2)
    pool.add_cached(run_of(7), run_of(cached))
    pool.hold(run_of(7))

    pool.free(run_of(private, cached))
    assert (pool._slots.num_free, pool.num_unheld) == (3, 0)
    pool.free(run_of(cached))
    assert (pool._slots.num_free, pool.num_unheld) == (3, 1)
    pool.remove_cached(run_of(7))
    assert (pool._slots.num_free, pool.num_unheld) == (4, 0)


def test_two_requests_may_free_the_same_slot_in_one_step() -> None:
    pool = GroupSlots(4, num_tokens=20)
    (slot,) = pool.alloc(1)
    pool.add_cached(run_of(7), run_of(slot))
    pool.hold(run_of(7))

    pool.free(run_of(slot, slot))

    assert (pool.num_unheld, pool.used) == (1, 0)


@fresh_histories
@given(st.data())
def test_the_queue_pops_slots_in_the_order_in_which_they_were_pushed(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    queue, expected = SlotQueue(size), OrderedDict[int, None]()
    for _ in range(data.draw(st.integers(0, 60))):
        slots = data.draw(st.lists(st.integers(0, size - 1), unique=True))
        match data.draw(st.sampled_from(["push", "remove", "pop"])):
            case "push":
                new = [slot for slot in slots if slot not in expected]
                queue.push(run_of(*new))
                expected.update(dict.fromkeys(new))
            case "remove":
                queue.remove(run_of(*slots))
                for slot in slots:
                    expected.pop(slot, None)
            case _:
                count = data.draw(st.integers(0, len(expected)))
                assert queue.pop(count).tolist() == [expected.popitem(last=False)[0] for _ in range(count)]
        assert len(queue) == len(expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_of_one_prompt_share_its_windowed_slots(depth: int) -> None:
    server = Server(make(2000, windowed=windowed(8 * (KEPT + 1) + 64), max_running=8), depth)
    reqs = [make_req(i, prompt(100), 30, salt="group 1", keeps_kv_cached=False) for i in range(8)]

    server.run(reqs)

    assert server.worker.computed < 2 * 100 + 8 * 31
    assert all(req.output_ids == truth(req.prompt_ids, req.seed, 30) for req in reqs)
    (pool,) = server.scheduler.only_group.pool.groups
    assert isinstance(pool, SlidingWindowPool)
    assert pool.slots.available == pool.slots.size
    assert not pool.slots.num_unheld
    server.assert_idle()


def test_few_equal_ids_of_an_image_are_no_prefix_that_a_load_may_continue() -> None:
    server = Server(make(1000, windowed=windowed(200)))
    server.run([make_req(0, prompt(12), 1)])
    other = make_req(1, [*prompt(3), *prompt(9, 2000)], 1)
    other.images = (item("b", 1, 6),)

    pool = server.scheduler.only_group.pool

    assert pool.cached_prefix(other).usable_len == pool.cached_len(other) == 1
