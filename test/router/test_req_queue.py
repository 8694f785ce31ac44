"""The queue: blocked requests come back to their places, at their events or deadlines, and leave nothing behind."""

from __future__ import annotations

import pytest

from lightserve.router.policy import LOOK_AHEAD, CachedLen, Fifo, Policy, make_policy
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue, Wait
from test.cpu_time import growth
from test.router.scheduler.test_scheduler import make_req


def queue_of(*req_ids: int, policy: Policy | None = None) -> tuple[ReqQueue, dict[int, Req]]:
    queue = ReqQueue(policy or Fifo())
    reqs = {req_id: make_req(req_id, [1, 2, 3]) for req_id in req_ids}
    for req in reqs.values():
        queue.add(req)
    return queue, reqs


def order(queue: ReqQueue) -> list[int]:
    return [req.req_id for req in queue.candidates(lambda req: 0)]


def test_a_request_comes_back_to_its_place() -> None:
    queue, reqs = queue_of(0, 1, 2, 3)
    wait = Wait()
    queue.block(reqs[1], wait)
    queue.block(reqs[2], wait)
    assert (order(queue), len(queue), queue.num_blocked) == ([0, 3], 2, 2)

    wait.end()

    assert (order(queue), len(queue), queue.num_blocked) == ([0, 1, 2, 3], 4, 0)


def test_a_held_request_has_the_place_of_its_arrival() -> None:
    queue, _ = queue_of(0)
    held, later = make_req(1, [1]), make_req(2, [1])
    queue.defer(held)
    queue.add(later)
    assert order(queue) == [0, 2]

    queue.make_ready(held)

    assert order(queue) == [0, 1, 2]


def test_a_preempted_request_comes_back_before_those_that_have_not_begun() -> None:
    queue, _ = queue_of(5, 6)
    preempted = make_req(9, [1])
    preempted.begin()
    queue.add_preempted(preempted)
    wait = Wait()
    queue.block(preempted, wait)
    assert queue.find_preempted(9) is preempted

    wait.end()

    assert order(queue) == [9, 5, 6]


def test_priority_decides_the_place_of_a_request_that_comes_back() -> None:
    queue, reqs = queue_of(0, 1, policy=make_policy("priority"))
    urgent, wait = make_req(2, [1], priority=-1), Wait()
    queue.add(urgent)
    queue.block(urgent, wait)
    queue.block(reqs[0], wait)

    wait.end()

    assert order(queue) == [2, 0, 1]


def test_requests_come_back_at_the_deadline_of_what_they_wait_for() -> None:
    queue, reqs = queue_of(0, 1)
    late: list[Req] = []
    queue.block(reqs[0], Wait(5.0, late.append))
    queue.block(reqs[1], Wait(7.0, late.append))
    assert queue.next_deadline_s() == 5.0

    queue.end_late_waits(6.0)

    assert late == [reqs[0]]
    assert order(queue) == [0]
    assert queue.next_deadline_s() == 7.0


def test_requests_that_have_ended_leave_no_deadline() -> None:
    queue, reqs = queue_of(*range(100))
    for req in reqs.values():
        queue.block(req, Wait(5.0))
    last = make_req(100, [1])
    queue.add(last)
    queue.block(last, Wait(9.0))

    for req in reqs.values():
        queue.remove(req)

    assert queue.next_deadline_s() == 9.0
    assert (queue.num_blocked, queue.num_tokens) == (1, 1)


def test_a_request_that_waits_for_one_thing_after_the_other_has_the_last_deadline() -> None:
    queue, (req,) = (made := queue_of(0))[0], made[1].values()
    first, second = Wait(5.0), Wait(3.0)
    queue.block(req, first)

    first.continue_with(second)

    assert queue.next_deadline_s() == 3.0
    first.end()
    assert queue.num_blocked == 1
    second.end()
    assert queue.next_deadline_s() is None


def test_after_a_crash_only_held_requests_stay_blocked() -> None:
    queue, reqs = queue_of(0, 1)
    held = make_req(2, [1])
    queue.defer(held)
    queue.block(reqs[0], Wait(5.0))

    queue.end_waits()

    assert order(queue) == [0, 1]
    assert queue.num_blocked == 1


def test_a_policy_orders_requests_that_could_run() -> None:
    class Recorded(Fifo):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def order(self, first: list[Req], cached_len: CachedLen) -> list[Req]:
            self.seen.append([req.req_id for req in first])
            return first[::-1]

    policy = Recorded()
    count = 2 * LOOK_AHEAD
    queue, _ = queue_of(*range(count + 1), policy=policy)
    for req in queue.candidates(lambda req: 0):
        if req.req_id == count:
            break
        queue.block(req, Wait())

    assert policy.seen == [[*range(LOOK_AHEAD)], [*range(LOOK_AHEAD, count)], [count]]


def test_admissions_count_as_passing_a_blocked_request() -> None:
    queue, reqs = queue_of(0, 1, 2)
    wait = Wait()
    queue.block(reqs[0], wait)

    queue.admit(reqs[2])

    wait.end()
    assert [reqs[req_id].num_passed_over for req_id in (0, 1)] == [1, 1]


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_cost_of_a_request_does_not_grow_with_the_number_of_waiting_ones(is_blocked: bool) -> None:
    """Those that are blocked are not looked at, and of the ready ones only the first."""

    def come_and_go(num_waiting: int) -> None:
        queue, _ = queues[num_waiting]
        for req_id in range(200):
            req, wait = make_req(100_000 + req_id, [1], priority=-10_000), Wait(5.0)
            queue.add(req)
            queue.block(req, wait)
            wait.end()
            assert next(queue.candidates(lambda req: 0)) is req
            queue.admit(req)

    queues = {count: queue_of(*range(count), policy=make_policy("priority")) for count in (4_000, 1_000)}
    for queue, reqs in queues.values():
        for req in reqs.values() if is_blocked else ():
            queue.block(req, Wait(50.0))

    assert growth(come_and_go, 4_000) < 2
