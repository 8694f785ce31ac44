"""The scheduler, against a worker that answers without a model."""

from __future__ import annotations

import random
from collections import deque

import pytest

from lightserve.io_struct import FinishReason, SamplingParams, Step, TokenOut
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler

EOS = 7


class FakeWorker:
    """Keeps the tokens of its requests as a real one does, checks what it is told, and emits EOS by script."""

    def __init__(self, num_slots: int, end_after: dict[int, int]) -> None:
        self.num_slots = num_slots
        self.end_after = end_after
        self.known: dict[int, int] = {}  # tokens known
        self.cached: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.slots: dict[int, set[int]] = {}

    def run(self, step: Step) -> list[TokenOut]:
        for req_id in step.free:
            for held in (self.known, self.cached, self.made, self.slots):
                del held[req_id]
        for new in step.new:
            self.known[new.req_id], self.cached[new.req_id], self.made[new.req_id] = len(new.prompt_ids), 0, 0
            self.slots[new.req_id] = set()
        outs = []
        for row in step.rows:
            taken = set().union(*self.slots.values())
            assert len(set(row.slots)) == len(row.slots)
            assert not taken & set(row.slots), "a slot has two owners"
            assert all(0 <= slot < self.num_slots for slot in row.slots)
            self.slots[row.req_id] |= set(row.slots)
            self.cached[row.req_id] += len(row.slots)
            assert self.cached[row.req_id] <= self.known[row.req_id]
            if self.cached[row.req_id] == self.known[row.req_id]:
                self.known[row.req_id] += 1
                self.made[row.req_id] += 1
                is_last = self.made[row.req_id] == self.end_after.get(row.req_id)
                outs.append(TokenOut(row.req_id, EOS if is_last else 1, 0.0))
        return outs


def run(scheduler: Scheduler, worker: FakeWorker, reqs: list[Req], depth: int) -> None:
    """As the router does: up to ``depth`` steps are planned and run before the tokens of the first are seen."""
    for req in reqs:
        scheduler.add(req)
    under_way: deque[list[TokenOut]] = deque()
    while True:
        while len(under_way) < depth and (step := scheduler.next_step()):
            under_way.append(worker.run(step))
        if not under_way:
            return
        scheduler.take(under_way.popleft())


def make_req(req_id: int, prompt_len: int, max_new_tokens: int) -> Req:
    return Req(req_id, [3] * prompt_len, SamplingParams(max_new_tokens=max_new_tokens), max_new_tokens, (EOS,))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_as_it_should_whatever_the_load(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(60, 200)
    reqs = [make_req(i, rng.randint(1, 40), rng.randint(1, 20)) for i in range(50)]
    end_after = {req.req_id: rng.randint(1, 25) for req in reqs}
    scheduler = Scheduler(num_slots, rng.randint(1, 12), rng.randint(1, 64))
    worker = FakeWorker(num_slots, end_after)

    run(scheduler, worker, reqs, depth)

    for req in reqs:
        ends_by_itself = end_after[req.req_id] <= req.max_new_tokens
        assert req.finish_reason is (FinishReason.STOP if ends_by_itself else FinishReason.LENGTH)
        assert len(req.output_ids) == min(end_after[req.req_id], req.max_new_tokens)
    assert scheduler.slots.num_used == 0
    assert not worker.known


def test_a_prompt_longer_than_the_budget_goes_in_chunks_beside_running_requests() -> None:
    scheduler = Scheduler(1000, 8, batch_max_tokens=10)
    worker = FakeWorker(1000, {})
    scheduler.add(make_req(0, 3, 50))
    scheduler.take(worker.run(scheduler.next_step() or pytest.fail("idle")))
    scheduler.add(make_req(1, 25, 5))

    sizes = []
    for _ in range(4):
        step = scheduler.next_step() or pytest.fail("idle")
        sizes.append([len(row.slots) for row in step.rows])
        scheduler.take(worker.run(step))

    assert sizes == [[1, 10], [1, 10], [1, 5], [1, 1]]


def test_aborting_gives_everything_back() -> None:
    scheduler = Scheduler(100, 2, batch_max_tokens=10)
    worker = FakeWorker(100, {})
    for i in range(5):
        scheduler.add(make_req(i, 12, 9))
    scheduler.take(worker.run(scheduler.next_step() or pytest.fail("idle")))

    scheduler.abort_all()
    worker.run(scheduler.next_step() or pytest.fail("the worker still holds requests"))

    assert scheduler.slots.num_used == 0
    assert not worker.known
    assert scheduler.next_step() is None


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_at_any_time_leave_nothing_behind(depth: int) -> None:
    rng = random.Random(depth)
    scheduler = Scheduler(300, 6, batch_max_tokens=16)
    worker = FakeWorker(300, {})
    for i in range(60):
        scheduler.add(make_req(i, rng.randint(1, 40), rng.randint(1, 30)))
    under_way: deque[list[TokenOut]] = deque()

    while True:
        while len(under_way) < depth and (step := scheduler.next_step()):
            under_way.append(worker.run(step))
        if not under_way:
            break
        if rng.random() < 0.3:
            scheduler.abort(rng.randrange(60))
        scheduler.take(under_way.popleft())

    assert scheduler.slots.num_used == scheduler.num_running == scheduler.num_waiting == 0
    assert not worker.known


def test_a_request_is_told_which_of_its_stop_tokens_ended_it() -> None:
    sampling = SamplingParams(max_new_tokens=5, stop_token_ids=(EOS,), ignore_eos=True)
    req = Req(0, [3], sampling, 5, (EOS,))

    run(Scheduler(10, 1, batch_max_tokens=16), FakeWorker(10, {0: 2}), [req], depth=1)

    assert req.finish_reason is FinishReason.STOP
    assert req.stop_token == EOS
