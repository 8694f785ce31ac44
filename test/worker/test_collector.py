from __future__ import annotations

import threading

import pytest

from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.messages.int_arrays import Int64Array
from lightserve.messages.params import GrammarSpec, SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.collector import HostCounts, PendingStep, StepCollector
from lightserve.worker.sampling.grammar import GrammarOutput
from lightserve.worker.worker import ModelWorker
from test.waiting import DEADLINE_S

PROMPT = [5, 17, 3, 99, 42]


def worker_of(folder: str) -> ModelWorker:
    config = WorkerConfig(model_dir=folder, device="cpu", data_type="float32", max_total_token_num=100)
    return ModelWorker(config, resolve(folder), Parallel())


@pytest.mark.parametrize("is_later_first", [False, True])
def test_tokens_reach_a_request_in_the_order_of_the_steps_whichever_is_collected_first(
    folder: str, is_later_first: bool
) -> None:
    """One thread waits for each step, and the thread of the later step may be first."""
    worker = worker_of(folder)
    sampling = SamplingParams(temperature=0.0)
    prompt = Step([StepRow(1, list(range(5)))], [NewReq(1, PROMPT, sampling, seed=0)])
    collects = [worker.launch(prompt), worker.launch(Step([StepRow(1, [5])]))]

    outs = {}
    for number in (1, 0) if is_later_first else (0, 1):
        outs[number] = collects[number]()
    tokens = [*outs[0].tokens, *outs[1].tokens]
    (req,) = worker._batch._reqs.values()
    worker.launch(Step([]))  # applies them

    assert req.token_ids.tolist() == [*PROMPT, *(out.token.id for out in tokens)]
    assert tokens[0].token.id != tokens[1].token.id  # else the order would not show


def test_a_request_changes_only_when_a_step_is_launched(folder: str) -> None:
    """The thread that collects leaves the batch alone, however the two threads interleave."""
    worker = worker_of(folder)
    collect = worker.launch(Step([StepRow(1, list(range(5)))], [NewReq(1, PROMPT, SamplingParams(), seed=0)]))
    (req,) = worker._batch._reqs.values()
    thread = threading.Thread(target=collect)
    thread.start()
    thread.join(DEADLINE_S)
    before = list(req.token_ids), req.total_len

    worker.launch(Step([]))

    assert before == (PROMPT, 6)
    assert req.token_ids.tolist() == [*PROMPT, collect().tokens[0].token.id]
    assert req.total_len == 6


def test_a_step_waits_for_the_tokens_that_end_a_prefix(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar is over before its tokens are queued: a step that is launched meanwhile must wait for them."""
    worker = worker_of(small_folder)
    may_go_on, has_advanced = threading.Event(), threading.Event()
    add, collect_all = GrammarOutput.add, StepCollector.collect_all

    def add_slowly(output: GrammarOutput, token_id: int) -> bool:
        added = add(output, token_id)
        has_advanced.set()
        assert may_go_on.wait(DEADLINE_S)
        return added

    def collect_all_noted(collector: StepCollector) -> None:
        may_go_on.set()
        collect_all(collector)

    sampling = SamplingParams(grammar=GrammarSpec("prefix", "ab12-"))
    first = worker.launch(Step([StepRow(1, list(range(5)))], [NewReq(1, [3, 1, 4, 1, 5], sampling, seed=0)]))
    monkeypatch.setattr(GrammarOutput, "add", add_slowly)
    monkeypatch.setattr(StepCollector, "collect_all", collect_all_noted)
    waiting = threading.Thread(target=first)
    waiting.start()
    assert has_advanced.wait(DEADLINE_S)
    second = worker.launch(Step([StepRow(1, [5])]))
    waiting.join(DEADLINE_S)
    (req,) = worker._batch._reqs.values()

    assert first().plain.counts.tolist() == [len(first().tokens)]  # the sampled token, and those that are forced
    assert len(first().tokens) > 1
    assert not second().tokens  # it computed the sampled token, and the forced tokens follow that one
    assert not second().failed
    assert not req.has_token_in_flight


def test_a_step_that_fails_raises_for_the_thread_that_waits_for_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(folder)
    prompt = Step([StepRow(1, list(range(5)))], [NewReq(1, PROMPT, SamplingParams(), seed=0)])
    first, second = worker.launch(prompt), worker.launch(Step([StepRow(1, [5])]))
    token_ids = PendingStep.token_ids
    failing = worker._collector._pending[0]

    def fail_once(step: PendingStep) -> tuple[Int64Array, HostCounts | None]:
        if step is failing:
            raise RuntimeError("out of memory")
        return token_ids(step)

    monkeypatch.setattr(PendingStep, "token_ids", fail_once)

    assert len(second().tokens) == 1  # it collects the first step too
    with pytest.raises(RuntimeError, match="out of memory"):
        first()
