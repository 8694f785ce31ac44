"""The worker without a model gives the same tokens to the same request, whatever happens to it."""

from __future__ import annotations

from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.null_worker import FIRST_TEXT_ID, VOCAB_SIZE, NullWorker, model_vocab_size
from test.real_model import smollm2_tokenizer


def new(req_id: int, prompt_ids: list[int], cached: int = 0) -> NewReq:
    return NewReq(req_id, prompt_ids, SamplingParams(), seed=0, cached_slots=list(range(cached)))


def tokens_of(worker: NullWorker, step: Step) -> dict[int, int]:
    return {out.req_id: out.token.id for out in worker.launch(step)().tokens}


def test_a_token_follows_the_last_token_of_its_own_request() -> None:
    worker = NullWorker(step_s=0)

    first = tokens_of(worker, Step([StepRow(1, [0, 1]), StepRow(2, [2])], new=[new(1, [5, 2007]), new(2, [2100])]))
    second = tokens_of(worker, Step([StepRow(1, [3]), StepRow(2, [4])]))

    assert (first, second) == ({1: 2008, 2: 2101}, {1: 2009, 2: 2102})


def test_a_request_that_enters_again_continues_where_it_was() -> None:
    worker = NullWorker(step_s=0)
    tokens_of(worker, Step([StepRow(1, [0])], new=[new(1, [VOCAB_SIZE - 1])]))

    entered = new(1, [VOCAB_SIZE - 1, FIRST_TEXT_ID], cached=1)
    again = tokens_of(worker, Step([StepRow(1, [1])], new=[entered], free=[1]))

    assert again == {1: FIRST_TEXT_ID + 1}


def test_the_output_has_text_even_after_a_prompt_that_ends_in_a_byte() -> None:
    worker = NullWorker(step_s=0)

    assert tokens_of(worker, Step([StepRow(1, [0])], new=[new(1, [198])])) == {1: FIRST_TEXT_ID}


def test_the_vocabulary_is_the_models() -> None:
    worker = NullWorker(step_s=0, vocab_size=40_000)

    first = tokens_of(worker, Step([StepRow(1, [0])], new=[new(1, [VOCAB_SIZE])]))

    assert first == {1: VOCAB_SIZE + 1}
    assert model_vocab_size(resolve(None, needs_weights=False)) == smollm2_tokenizer().vocab_size


def test_a_part_of_a_prompt_brings_no_token() -> None:
    worker = NullWorker(step_s=0)

    part = tokens_of(worker, Step([StepRow(1, [0, 1])], new=[new(1, [5, 6, 2007])]))
    rest = tokens_of(worker, Step([StepRow(1, [2])]))

    assert (part, rest) == ({}, {1: 2008})


def test_a_request_that_wants_logprobs_gets_as_many_as_it_wants() -> None:
    worker = NullWorker(step_s=0.0, vocab_size=2000)
    new = NewReq(1, [1500], SamplingParams(logprobs=3), seed=0)

    [out] = worker.launch(Step([StepRow(1, [0])], [new]))().detailed

    assert out.token.id == 1501
    assert [token_id for token_id, _ in out.token.top_logprobs or []] == [1501, 1502, 1503]
