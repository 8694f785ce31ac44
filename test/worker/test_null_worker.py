"""The worker without a model gives the same tokens to the same request, whatever happens to it."""

from __future__ import annotations

from lightserve.io_struct import NewReq, SamplingParams, Step, StepRow
from lightserve.worker.null_worker import VOCAB_SIZE, NullWorker


def new(req_id: int, prompt_ids: list[int], cached: int = 0) -> NewReq:
    return NewReq(req_id, prompt_ids, SamplingParams(), seed=0, cached_slots=list(range(cached)))


def tokens_of(worker: NullWorker, step: Step) -> dict[int, int]:
    return {out.req_id: out.token.id for out in worker.launch(step)().tokens}


def test_a_token_follows_the_last_token_of_its_own_request() -> None:
    worker = NullWorker(step_s=0)

    first = tokens_of(worker, Step([StepRow(1, [0, 1]), StepRow(2, [2])], new=[new(1, [5, 7]), new(2, [100])]))
    second = tokens_of(worker, Step([StepRow(1, [3]), StepRow(2, [4])]))

    assert (first, second) == ({1: 8, 2: 101}, {1: 9, 2: 102})


def test_a_request_that_enters_again_continues_where_it_was() -> None:
    worker = NullWorker(step_s=0)
    tokens_of(worker, Step([StepRow(1, [0])], new=[new(1, [VOCAB_SIZE - 1])]))

    again = tokens_of(worker, Step([StepRow(1, [1])], new=[new(1, [VOCAB_SIZE - 1, 0], cached=1)], free=[1]))

    assert again == {1: 1}


def test_a_part_of_a_prompt_brings_no_token() -> None:
    worker = NullWorker(step_s=0)

    part = tokens_of(worker, Step([StepRow(1, [0, 1])], new=[new(1, [5, 6, 7])]))
    rest = tokens_of(worker, Step([StepRow(1, [2])]))

    assert (part, rest) == ({}, {1: 8})
