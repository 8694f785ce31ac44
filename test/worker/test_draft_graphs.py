"""Steps with drafts as graphs: padded to a captured shape, they give the texts of single launches."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightserve.common.basemodel.hooks import hooks_of
from lightserve.common.device import Graphs
from lightserve.common.device.cpu import CpuDevice
from lightserve.common.device.profile import H200_GRAPHS
from lightserve.offline.llm import LLM
from lightserve.worker.batch.step_input import StepShape
from lightserve.worker.captured_shapes import draft_shape_for, draft_shapes, mixed_draft_shapes
from lightserve.worker.step_runner import StepOut
from lightserve.worker.worker import ModelWorker
from test.worker.test_drafts import NUM_DRAFTS, PLAIN, Drafting, Oracle, make, params_of, prompts_of, texts_of
from test.worker.test_mtp import LIKELY, LONG, MTP, save_model as save_mtp_model
from test.worker.test_ngram import (
    GREEDY,
    assert_same,
    make as make_mtp,
    params_of as fields_of,
    prompts_of as repeating_prompts,
)

CONFIG = f'{{"method": "ngram", "num_speculative_tokens": {NUM_DRAFTS}}}'


class NoNumbersFromTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A capture refuses to copy from the host, as a GPU does where a number is assigned to indexed rows.

    The definitions of ops may do so: a GPU has kernels for them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default and _is_number(*args[:3]) and not _is_in_definition():
            raise RuntimeError("a number is assigned to indexed rows in a captured step; use index_fill_")
        return func(*args, **(kwargs or {}))


def _is_number(out: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> bool:
    """The values of one index have no dimension either."""
    return values.dim() == 0 and any(index is not None and index.numel() > 1 for index in indices)


def _is_in_definition() -> bool:
    return any("/lightserve/common/ops/" in frame.filename for frame in traceback.extract_stack())


class RerunGraphs:
    """As CudaGraphs: a replay copies its input to where the captured one was, and writes its result to one place."""

    def __init__(self, function: Callable[[Tensor, StepShape], StepOut]) -> None:
        self._function = function
        self._inputs: dict[StepShape, Tensor] = {}
        self.replays: Counter[StepShape] = Counter()

    @property
    def captured(self) -> frozenset[StepShape]:
        return frozenset(self._inputs)

    def __contains__(self, key: StepShape) -> bool:
        return key in self._inputs

    def capture(self, examples: Iterable[tuple[StepShape, Tensor]]) -> None:
        for key, example in examples:
            with NoNumbersFromTheHost():  # type: ignore[no-untyped-call]
                self._function(example.clone(), key)
            self._inputs[key] = example

    def clear(self) -> None:
        self._inputs.clear()

    def replay(self, key: StepShape, inputs: Tensor) -> StepOut:
        self.replays[key] += 1
        return self._function(self._inputs[key].copy_(inputs).clone(), key)  # unlike a kernel, torch may keep views


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RerunGraphs]:
    made: list[RerunGraphs] = []

    def make_graphs(self: CpuDevice, function: Callable[[Tensor, StepShape], StepOut]) -> Graphs[StepShape, StepOut]:
        made.append(RerunGraphs(function))
        return made[-1]

    profile = CpuDevice.profile
    ranges = replace(H200_GRAPHS, decodes=(1, 2, 5, 16), tokens=(64, 256), requests=(24,), max_draft_tokens=64)
    monkeypatch.setattr(CpuDevice, "graphs", make_graphs)
    monkeypatch.setattr(CpuDevice, "profile", lambda self, device: replace(profile(self, device), graphs=ranges))
    monkeypatch.setattr(CpuDevice, "launches_async", True)
    return made


@pytest.mark.parametrize("depth", [1, 2])
def test_captured_steps_give_the_same_text(
    folder: str, graphs: list[RerunGraphs], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, wanted = prompts_of(15), params_of(PLAIN)
    expected = make(folder).generate(prompts, wanted)
    graphs.clear()
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    llm = LLM(
        folder,
        device="cpu",
        data_type="float32",
        max_total_token_num=4000,
        batch_max_tokens=200,
        running_max_req_size=6,  # so prompts begin beside decodes
        speculative_config=CONFIG,
    )
    watched = Drafting(llm, Oracle(texts_of(expected)))
    watched.worker.capture()

    generations = llm.generate(prompts, wanted)

    assert texts_of(generations) == texts_of(expected)
    assert all(watched.counts[count] for count in range(1, NUM_DRAFTS + 2))
    (captured,) = graphs
    with_drafts = Counter({shape: count for shape, count in captured.replays.items() if shape.num_drafts})
    assert len(with_drafts) > 1
    assert with_drafts.total() > 10
    assert any(shape.has_decodes for shape in with_drafts)  # some compute prompts too


def test_callbacks_see_every_step_and_captured_steps_come_back_afterwards(
    folder: str, graphs: list[RerunGraphs]
) -> None:
    llm = LLM(folder, device="cpu", data_type="float32", max_total_token_num=4000, speculative_config=CONFIG)
    llm.worker.capture()
    (captured,) = graphs
    prompts, wanted = prompts_of(2), params_of(PLAIN)[:2]
    expected = texts_of(llm.generate(prompts, wanted))
    replays, seen = captured.replays.total(), Counter[str]()

    remove = hooks_of(llm.worker.model).register("layers.0.ffn", lambda name, value: seen.update([name]))
    observed = texts_of(llm.generate(prompts, wanted))
    remove()

    assert observed == expected
    assert captured.replays.total() == replays > 0
    assert seen["layers.0.ffn"] >= len(wanted)
    llm.generate(prompts, wanted)
    assert captured.replays.total() > replays


def test_every_captured_shape_is_padded_to_itself() -> None:
    shapes, mixed = list(draft_shapes(256, H200_GRAPHS, 3)), list(mixed_draft_shapes(256, H200_GRAPHS, 3))

    assert shapes
    assert mixed
    assert all(draft_shape_for(shape, H200_GRAPHS, 3) == shape for shape in shapes + mixed)
    assert all(shape.tokens <= H200_GRAPHS.max_draft_tokens for shape in shapes)
    assert not list(draft_shapes(256, H200_GRAPHS, 0))
    assert not list(mixed_draft_shapes(256, H200_GRAPHS, 0))


@pytest.mark.parametrize(
    ("tokens", "requests", "padded"),
    [(4, 1, (4, 1)), (2, 1, (4, 1)), (20, 5, (32, 8)), (70, 40, (96, 48)), (150, 40, (192, 48)), (600, 520, None)],
)
def test_a_step_has_room_for_all_drafts_unless_there_are_many_requests(
    tokens: int, requests: int, padded: tuple[int, int] | None
) -> None:
    shape = StepShape(tokens, requests, has_decodes=False, has_prompts=True, num_drafts=1)

    found = draft_shape_for(shape, H200_GRAPHS, 3)

    assert (None if found is None else (found.tokens, found.requests)) == padded


def test_drafts_add_few_graphs() -> None:
    assert len(list(draft_shapes(256, H200_GRAPHS, 3))) <= 26
    assert {shape.num_drafts for shape in draft_shapes(64, H200_GRAPHS, 8)} == {8}


@pytest.mark.parametrize(("num_drafts", "most"), [(1, 26), (3, 42), (8, 60), (32, 60)])
def test_the_passes_of_a_head_add_few_graphs(num_drafts: int, most: int) -> None:
    shapes = list(draft_shapes(256, H200_GRAPHS, num_drafts, has_head=True))

    assert len(shapes) <= most
    assert all(draft_shape_for(shape, H200_GRAPHS, num_drafts, has_head=True) == shape for shape in shapes)
    assert all(0 < shape.next_drafts <= num_drafts for shape in shapes)


def test_a_head_drafts_the_same_tokens_after_captured_steps(
    tmp_path: Path, graphs: list[RerunGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mtp_model(tmp_path, "glm4_moe")
    prompts = repeating_prompts(12)
    lengths = range(10, 10 + len(prompts))  # so prompts begin beside decodes
    params = [fields_of(GREEDY, LONG, LIKELY, {"max_new_tokens": length}) for length in lengths]
    launched, captured = (make_mtp(tmp_path, MTP, running_max_req_size=6) for _ in range(2))
    captured_worker = captured.worker
    assert isinstance(captured_worker, ModelWorker)
    expected = launched.generate(prompts, params)
    captured_worker.capture()
    before = graphs[-1].replays.total()

    generations = captured.generate(prompts, params)

    assert_same(generations, expected)
    assert [one.drafts for one in generations] == [one.drafts for one in expected]
    replayed = {shape for shape, count in graphs[-1].replays.items() if count}
    assert graphs[-1].replays.total() > before
    assert {shape.has_decodes for shape in replayed if shape.num_drafts} == {False, True}  # True: with prompts
    assert {shape.next_drafts for shape in replayed if shape.num_drafts} == {1, 2, 3}  # fewer before the last tokens
