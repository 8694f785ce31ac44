"""The offline scheduler, against a worker that answers without a model."""

from __future__ import annotations

import random

import pytest

from lightserve.batching import ContinuousBatching, Req
from lightserve.io_struct import FinishReason, SamplingParams, Step, TokenOut

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


def run(batching: ContinuousBatching, worker: FakeWorker, reqs: list[Req]) -> None:
    for req in reqs:
        batching.add(req)
    while step := batching.next_step():
        for req in batching.take(worker.run(step)):
            if req.finish_reason is not None:
                batching.release(req)


def make_req(req_id: int, prompt_len: int, max_new_tokens: int) -> Req:
    return Req(req_id, [3] * prompt_len, SamplingParams(max_new_tokens=max_new_tokens), max_new_tokens, (EOS,))


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends_as_it_should_whatever_the_load(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(60, 200)
    reqs = [make_req(i, rng.randint(1, 40), rng.randint(1, 20)) for i in range(50)]
    end_after = {req.req_id: rng.randint(1, 25) for req in reqs}
    batching = ContinuousBatching(num_slots, rng.randint(1, 12), rng.randint(1, 64))
    worker = FakeWorker(num_slots, end_after)

    run(batching, worker, reqs)

    for req in reqs:
        ends_by_itself = end_after[req.req_id] <= req.max_new_tokens
        assert req.finish_reason is (FinishReason.STOP if ends_by_itself else FinishReason.LENGTH)
        assert len(req.output_ids) == min(end_after[req.req_id], req.max_new_tokens)
    assert batching.slots.num_used == 0
    assert not worker.known


def test_a_prompt_longer_than_the_budget_goes_in_chunks_beside_running_requests() -> None:
    batching = ContinuousBatching(1000, 8, batch_max_tokens=10)
    worker = FakeWorker(1000, {})
    batching.add(make_req(0, 3, 50))
    batching.take(worker.run(batching.next_step() or pytest.fail("idle")))
    batching.add(make_req(1, 25, 5))

    sizes = []
    for _ in range(4):
        step = batching.next_step() or pytest.fail("idle")
        sizes.append([len(row.slots) for row in step.rows])
        batching.take(worker.run(step))

    assert sizes == [[1, 10], [1, 10], [1, 5], [1, 1]]


def test_aborting_gives_everything_back() -> None:
    batching = ContinuousBatching(100, 2, batch_max_tokens=10)
    worker = FakeWorker(100, {})
    for i in range(5):
        batching.add(make_req(i, 12, 9))
    batching.take(worker.run(batching.next_step() or pytest.fail("idle")))

    batching.abort_all()
    worker.run(batching.next_step() or pytest.fail("the worker still holds requests"))

    assert batching.slots.num_used == 0
    assert not worker.known
    assert batching.next_step() is None
