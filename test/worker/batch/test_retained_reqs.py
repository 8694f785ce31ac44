"""Requests that begin with what the worker keeps of others."""

from __future__ import annotations

import pytest

from lightserve.messages.params import SamplingParams
from lightserve.messages.step import ForkPrefix, NewReq, Step, StepRow
from lightserve.worker.worker import ModelWorker
from test.worker.test_step_runner import make

PROMPT = [5, 17, 3, 99, 42, 8]
SLOTS = list(range(10, 16))
SAMPLING = SamplingParams(temperature=0.0, logprobs=3)


@pytest.fixture(scope="module")
def worker(folder: str) -> ModelWorker:
    return make(folder, "cpu")


def end_parent(worker: ModelWorker, chunks: tuple[int, ...] = (6,)) -> None:
    """Compute the prompt of request 1 in chunks, and free it. The worker keeps it."""
    new, begin = [NewReq(1, PROMPT, SAMPLING, seed=0)], 0
    for count in chunks:
        worker.run(Step([StepRow(1, SLOTS[begin : begin + count])], new))
        new, begin = [], begin + count
    worker.run(Step([], free=[1], retain=[1]))


def first_token(worker: ModelWorker, new: NewReq, slot: int) -> object:
    [out] = worker.run(Step([StepRow(new.req_id, [slot])], [new])).detailed
    worker.run(Step([], free=[new.req_id]))
    return out.token


@pytest.mark.parametrize("chunks", [(6,), (2, 3, 1)])
@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_a_child_computes_what_it_would_without_a_parent(
    worker: ModelWorker, chunks: tuple[int, ...], shares_prefixes: bool
) -> None:
    worker._batch.shares_prefixes = shares_prefixes
    end_parent(worker, chunks)
    expected = first_token(worker, NewReq(2, [*PROMPT, 7], SAMPLING, seed=0, cached_slots=SLOTS), 50)

    found = first_token(worker, NewReq(3, [7], SAMPLING, seed=0, parent=ForkPrefix(1, 6, 6)), 51)

    assert found == expected
    worker.run(Step([], release=[1]))
    assert not len(worker._batch.retained)


def test_a_child_may_begin_with_a_part_of_its_parent(worker: ModelWorker) -> None:
    """Its slots may differ from some token on, because the prefix cache has other ones."""
    end_parent(worker)
    prompt = [*PROMPT[:5], 7]
    expected = first_token(worker, NewReq(2, prompt, SAMPLING, seed=0, cached_slots=SLOTS[:5]), 50)

    part = ForkPrefix(1, 5, 3)
    found = first_token(worker, NewReq(3, [7], SAMPLING, seed=0, cached_slots=SLOTS[3:5], parent=part), 51)

    assert found == expected
    worker.run(Step([], release=[1]))


def test_a_child_may_enter_with_the_step_that_frees_its_parent(worker: ModelWorker) -> None:
    worker.run(Step([StepRow(1, SLOTS)], [NewReq(1, PROMPT, SAMPLING, seed=0)]))

    child = NewReq(2, [7], SAMPLING, seed=0, parent=ForkPrefix(1, 6, 6))
    worker.run(Step([StepRow(2, [50])], [child], free=[1], retain=[1]))

    assert worker._batch._reqs[2].token_ids.tolist() == [*PROMPT, 7]
    worker.run(Step([], free=[2], release=[1]))


def test_a_reset_leaves_nothing(worker: ModelWorker) -> None:
    end_parent(worker)

    worker.reset()

    assert not len(worker._batch.retained)
