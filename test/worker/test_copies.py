"""KV that a step copies to other slots before its rows are computed."""

from __future__ import annotations

import pytest

from lightserve.config import KvDtype
from lightserve.io_struct import KvCopy, NewReq, SamplingParams, Step, StepRow
from lightserve.worker.worker import ModelWorker
from test.worker.test_step_runner import make

PROMPT = [5, 17, 3, 99, 42, 8]
SOURCE = list(range(10, 16))
GREEDY = SamplingParams(temperature=0.0)


def decode(worker: ModelWorker, slots: list[int], copies: list[KvCopy], count: int = 8) -> list[int]:
    """The tokens of a request whose prompt, but for the last token, is cached in ``slots``."""
    new = NewReq(2, PROMPT, GREEDY, seed=0, cached_slots=slots[:-1])
    result = worker.run(Step([StepRow(2, [slots[-1]])], [new], copies=copies))
    tokens = [out.token.id for out in result.tokens]
    for step in range(count - 1):
        tokens += [out.token.id for out in worker.run(Step([StepRow(2, [100 + step])])).tokens]
    worker.run(Step([], free=[2]))
    return tokens


def prefill(worker: ModelWorker) -> None:
    """Compute the prompt in SOURCE."""
    worker.run(Step([StepRow(1, SOURCE)], [NewReq(1, PROMPT, GREEDY, seed=0)]))
    worker.run(Step([], free=[1]))


@pytest.mark.parametrize(
    ("target", "kv_dtype"),
    [
        (list(range(40, 46)), "none"),
        (list(range(12, 18)), "none"),
        (SOURCE[::-1], "none"),
        (list(range(40, 46)), "fp8"),
        (list(range(40, 46)), "int8"),
    ],
    ids=["apart", "overlapping", "reversed", "fp8", "int8"],
)
def test_a_request_that_decodes_from_copied_kv_gets_the_same_tokens(
    folder: str, target: list[int], kv_dtype: KvDtype
) -> None:
    worker = make(folder, "cpu", kv_dtype)
    prefill(worker)
    expected = decode(worker, SOURCE, [])
    prefill(worker)

    found = decode(worker, target, [KvCopy(SOURCE, target)])

    assert found == expected
    assert len(set(expected)) > 1


def test_copies_of_a_step_are_made_in_their_order(folder: str) -> None:
    worker = make(folder, "cpu")
    prefill(worker)
    expected = decode(worker, SOURCE, [])
    between, target = list(range(30, 36)), list(range(50, 56))

    found = decode(worker, target, [KvCopy(SOURCE, between), KvCopy(between, target)])

    assert found == expected


def test_without_the_copy_the_tokens_are_others(folder: str) -> None:
    worker = make(folder, "cpu")
    for layer in range(worker.model_config.num_layers):
        worker.model.mem_manager.layer(layer).normal_()
    prefill(worker)

    assert decode(worker, list(range(40, 46)), []) != decode(worker, SOURCE, [])
