from __future__ import annotations

import threading

import pytest

from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.io_struct import GrammarSpec, NewReq, SamplingParams, Step, StepResult, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.infer_batch import InferReq
from lightserve.worker.pending_step import PendingStep
from lightserve.worker.worker import ModelWorker
from test.waiting import DEADLINE_S

PROMPT = [5, 17, 3, 99, 42]


def worker_of(folder: str) -> ModelWorker:
    config = WorkerConfig(model_dir=folder, device="cpu", data_type="float32", max_total_token_num=100)
    return ModelWorker(config, resolve(folder), Parallel())


@pytest.mark.parametrize("is_later_first", [False, True])
def test_tokens_reach_a_request_in_the_order_of_the_steps_whoever_is_collected_first(
    folder: str, is_later_first: bool
) -> None:
    """A thread waits for each step, and that of the later one may be the first to look."""
    worker = worker_of(folder)
    sampling = SamplingParams(temperature=0.0)
    prompt = Step([StepRow(1, list(range(5)))], [NewReq(1, PROMPT, sampling, seed=0)])
    collects = [worker.launch(prompt), worker.launch(Step([StepRow(1, [5])]))]

    outs = {}
    for number in (1, 0) if is_later_first else (0, 1):
        outs[number] = collects[number]()
    said = [*outs[0].tokens, *outs[1].tokens]
    (req,) = worker._batch._reqs.values()

    assert req.token_ids == [*PROMPT, *(out.token.id for out in said)]
    assert said[0].token.id != said[1].token.id  # else the order would not show


def test_a_step_waits_for_the_tokens_that_end_a_prefix(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grammar is over before the request has the tokens: who looks just then may not take it for free."""
    worker = worker_of(small_folder)
    may_append, is_appending = threading.Event(), threading.Event()
    append, collect = InferReq.append, PendingStep.collect

    def append_late(req: InferReq, chosen: int, forced: list[int]) -> None:
        is_appending.set()
        may_append.wait(DEADLINE_S)
        append(req, chosen, forced)

    def collect_asked(step: PendingStep) -> StepResult:
        may_append.set()
        return collect(step)

    sampling = SamplingParams(grammar=GrammarSpec("prefix", "ab12-"))
    first = worker.launch(Step([StepRow(1, list(range(5)))], [NewReq(1, [3, 1, 4, 1, 5], sampling, seed=0)]))
    monkeypatch.setattr(InferReq, "append", append_late)
    monkeypatch.setattr(PendingStep, "collect", collect_asked)
    waiting = threading.Thread(target=first)
    waiting.start()
    assert is_appending.wait(DEADLINE_S)
    second = worker.launch(Step([StepRow(1, [5])]))
    may_append.set()
    waiting.join(DEADLINE_S)
    (req,) = worker._batch._reqs.values()

    assert [out.is_forced for out in first().tokens][:2] == [False, True]
    assert second() == StepResult()  # it computed what was chosen, behind which the forced tokens are
    assert req.is_known
