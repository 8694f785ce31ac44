"""Recorded decodes of a CPU: the bits of steps that are computed call by call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.hooks import hooks_of
from lightserve.common.cpu_kernel import recorded
from lightserve.common.cpu_kernel._library import library
from lightserve.common.cpu_kernel.recorded import RecordedSteps
from lightserve.offline.llm import LLM
from lightserve.worker.worker import ModelWorker
from test.models.architectures.case import build
from test.models.architectures.cases import CASES
from test.worker.test_ngram import params_of

pytestmark = pytest.mark.skipif(library is None, reason="the C library was not built")

PROMPTS = [[3, 5, 7, 11], [2], [90, 1, 8, 8, 4, 40, 17]]
RECORDED = ["gpt2", "gemma3_text", "glm4"]
NOT_RECORDED = ["mixtral", "lfm2"]  # experts and the lengths of sequences are read on the host


def steps_of(llm: LLM) -> RecordedSteps[Any]:
    steps = llm.worker._runner._repeater
    assert isinstance(steps, RecordedSteps)
    return steps


def outputs(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[object]:
    """Greedy, seeded and penalised requests of other lengths, so that steps of one to three requests decode."""
    params = [
        params_of({"temperature": 0.0, "max_new_tokens": 24, "logprobs": 3, "ignore_eos": True}),
        params_of({"temperature": 1.0, "max_new_tokens": 12, "seed": 3, "ignore_eos": True}),
        params_of({"temperature": 0.7, "max_new_tokens": 18, "seed": 4, "repetition_penalty": 1.3, "ignore_eos": True}),
    ]
    return [(out.token_ids, out.logprobs) for out in llm.generate(prompts, params)]


def make(folder: str | Path) -> LLM:
    return LLM(str(folder), device="cpu", data_type="float32", max_total_token_num=600)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", [*RECORDED, *NOT_RECORDED])
def test_recorded_steps_have_the_bits_of_others(
    name: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    build(CASES[name]).hf.save_pretrained(tmp_path)
    llm = make(tmp_path)
    steps, runner = steps_of(llm), llm.worker._runner
    runner._repeater = None
    expected = outputs(llm)

    runner._repeater = steps

    assert [outputs(llm) for _ in range(3)] == [expected] * 3
    assert {key.tokens for key in steps._recordings} == ({1, 2, 3} if name in RECORDED else set())


def test_recordings_are_forgotten_when_the_kv_cache_moves(folder: str) -> None:
    llm = make(folder)
    others = [[token + 1 for token in prompt] for prompt in PROMPTS]  # nothing of them is in the prefix cache
    for _ in range(2):
        outputs(llm)
    assert steps_of(llm)._recordings

    llm.worker._runner.drop_captured()
    llm.worker.model.mem_manager.release()
    llm.worker.model.mem_manager.restore()

    assert not steps_of(llm)._recordings
    assert outputs(llm, others) == outputs(make(folder), others)


def test_hooks_see_every_decode(folder: str) -> None:
    llm = make(folder)
    outputs(llm)
    outputs(llm)
    seen: list[str] = []

    remove = hooks_of(llm.worker.model).register("logits", lambda name, value: seen.append(name))
    outputs(llm)
    remove()

    assert len(seen) >= 24


def double(inputs: Tensor, key: int) -> Tensor:
    return ops.rms_norm((inputs * key).float()[None], torch.ones(len(inputs)), 1e-6)


def unfit(read: Callable[[Tensor], object]) -> Callable[[Tensor, int], Tensor]:
    def function(inputs: Tensor, key: int) -> Tensor:
        read(inputs)
        return inputs * key

    return function


@torch.inference_mode()
@pytest.mark.parametrize(
    "read",
    [
        Tensor.tolist,
        lambda x: x.numpy().sum(),
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 1),
        lambda x: x[x > 1],
        torch.nonzero,
        torch.unique,
        lambda x: torch.rand(3),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_reads_values_is_not_recorded(read: Callable[[Tensor], object]) -> None:
    steps, function = RecordedSteps[int](), unfit(read)

    for i in range(1, 5):
        assert steps(function, torch.full((4,), i), 3).tolist() == [3 * i] * 4
    assert not steps._recordings


@torch.inference_mode()
def test_a_recording_computes_with_new_integers() -> None:
    steps, generator = RecordedSteps[int](), torch.Generator().manual_seed(5)
    ops.use_backend("cpu_native", "cpu")

    for _ in range(6):
        inputs = torch.randint(1, 100, (16,), generator=generator)
        for key in (2, 5):
            assert torch.equal(steps(double, inputs, key), double(inputs, key))
    assert set(steps._recordings) == {2, 5}


@torch.inference_mode()
def test_recordings_keep_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = RecordedSteps[int]()
    for _ in range(2):
        steps(double, torch.arange(16), 5)
    monkeypatch.setattr(recorded, "MAX_BYTES", 3 * steps._recordings[5].num_bytes)

    for _ in range(3):
        for key in range(8):
            steps(double, torch.arange(16), key)

    assert set(steps._recordings) == {5, 6, 7}

    large = RecordedSteps[int]()
    monkeypatch.setattr(recorded, "MAX_BYTES", 1)
    assert [steps_out.shape for steps_out in (large(double, torch.arange(16), 5) for _ in range(4))] == [(1, 16)] * 4
    assert not large._recordings
    assert large._too_large == {5}


@torch.inference_mode()
def test_calls_of_other_threads_are_not_recorded() -> None:
    done = []

    def function(inputs: Tensor, key: int) -> Tensor:
        other = threading.Thread(target=lambda: done.append(double(inputs, 1)))
        other.start()
        other.join()
        return double(inputs, key)

    steps = RecordedSteps[int]()
    for _ in range(2):
        steps(function, torch.arange(1, 17), 2)
    before = len(done)
    (recording,) = steps._recordings.values()

    assert torch.equal(steps(function, torch.arange(2, 18), 2), double(torch.arange(2, 18), 2))
    assert len(done) == before == 2
    assert sum(getattr(action, "func", None) is library.ls_repeat for action in recording._actions) == 1  # type: ignore[union-attr]
