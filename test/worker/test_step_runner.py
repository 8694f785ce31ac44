"""Steps padded to the shape of a graph against the same steps as they are, and graphs against plain launches."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import H200_GRAPHS
from lightserve.common.parallel import Parallel
from lightserve.config import KvDtype, WorkerConfig
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow, TokenOut
from lightserve.model_files.source import resolve
from lightserve.utils.progress import ProgressState, use_output
from lightserve.worker import step_runner
from lightserve.worker.batch.step_input import StepShape
from lightserve.worker.captured_shapes import graph_shape_for, graph_shapes
from lightserve.worker.step_runner import StepRunner
from lightserve.worker.worker import ModelWorker

MAX_REQS = 12


@pytest.fixture
def definitions() -> Iterator[None]:
    """The ops as they are defined: those of the CPU backend are never padded."""
    yield
    ops.use_backend(ops.REFERENCE)


def make(folder: str, device: str, kv_dtype: KvDtype = "auto") -> ModelWorker:
    config = WorkerConfig(
        model_dir=folder,
        device=device,
        data_type="float32",
        max_total_token_num=1000,
        max_req_total_len=100,
        running_max_req_size=MAX_REQS,
        kv_dtype=kv_dtype,
    )
    return ModelWorker(config, resolve(folder), Parallel())


class Driver:
    """Plans steps like a router, several in flight: prompts in chunks, and requests that decode."""

    def __init__(self, worker: ModelWorker, seed: int, depth: int = 2) -> None:
        self._worker = worker
        self._depth = depth
        self._rng = random.Random(seed)
        self._slots = iter(self._rng.sample(range(1000), 1000))
        self._known: dict[int, int] = {}  # tokens of a request
        self._planned: dict[int, int] = {}  # of them, those that were sent to be computed

    def run(self, steps: int) -> list[TokenOut]:
        outs: list[TokenOut] = []
        in_flight = deque([self._worker.launch(Step([], self._enter(MAX_REQS)))])
        for _ in range(steps):
            while len(in_flight) >= self._depth:
                outs += in_flight.popleft()().tokens
            in_flight.append(self._worker.launch(Step(self._rows())))
        for collect in in_flight:
            outs += collect().tokens
        self._worker.run(Step([], free=list(self._known)))
        return outs

    def _enter(self, count: int) -> list[NewReq]:
        new = []
        for req_id in range(count):
            prompt = [self._rng.randrange(128) for _ in range(self._rng.randint(1, 40))]
            sampling = SamplingParams(
                temperature=0.0 if req_id % 3 else 0.9,
                top_k=5 if req_id == 4 else -1,
                logprobs=2 if req_id == 5 else None,
                frequency_penalty=1.0 if req_id == 6 else 0.0,
                bad_words_ids=((7, 9),) if req_id == 7 else (),
            )
            new.append(NewReq(req_id, prompt, sampling, seed=req_id))
            self._known[req_id], self._planned[req_id] = len(prompt), 0
        return new

    def _rows(self) -> list[StepRow]:
        rows = []
        for req_id, known in self._known.items():
            left = known - self._planned[req_id]
            if left > 1 and self._rng.random() < 0.5:
                continue
            count = min(left, self._rng.randint(1, 20))
            rows.append(StepRow(req_id, [next(self._slots) for _ in range(count)]))
            self._planned[req_id] += count
            if self._planned[req_id] == known:
                self._known[req_id] += 1
        return rows


def test_a_padded_step_gives_the_tokens_of_the_step(folder: str, definitions: None) -> None:
    worker = make(folder, "cpu")
    ops.use_backend(ops.REFERENCE)
    expected = Driver(worker, seed=0).run(15)
    shapes: list[tuple[StepShape, StepShape]] = []

    def captured_shape(shape: StepShape) -> StepShape:
        larger = graph_shape_for(shape, H200_GRAPHS)
        assert larger is not None
        shapes.append((shape, larger))
        return larger

    worker._runner.captured_shape = captured_shape  # type: ignore[method-assign]
    outs = Driver(worker, seed=0).run(15)

    assert [(out.req_id, out.token.id) for out in outs] == [(out.req_id, out.token.id) for out in expected]
    assert any(out.token.logprob is not None for out in outs)
    kinds = {(shape.has_decodes, shape.has_prompts) for shape, larger in shapes if shape.tokens < larger.tokens}
    assert len(kinds) >= 2


def test_a_step_launched_before_the_last_tokens_are_known_gives_the_same(folder: str) -> None:
    worker = make(folder, "cpu")

    expected, outs = (Driver(worker, seed=2, depth=depth).run(30) for depth in (1, 2))

    assert [(out.req_id, out.token.id) for out in outs] == [(out.req_id, out.token.id) for out in expected]


@pytest.mark.gpu
def test_graphs_give_the_tokens_of_plain_launches(folder: str) -> None:
    worker = make(folder, "cuda")
    expected = Driver(worker, seed=1).run(15)
    replayed: list[StepShape] = []
    worker.capture()
    run = StepRunner.run

    def counting(runner: StepRunner, inputs: object, shape: StepShape, *others: object) -> step_runner.StepOut:
        assert runner._graphs is not None
        if shape in runner._graphs:
            replayed.append(shape)
        return run(runner, inputs, shape, *others)  # type: ignore[arg-type]

    worker._runner.run = counting.__get__(worker._runner)  # type: ignore[method-assign]
    outs = Driver(worker, seed=1).run(15)

    assert [(out.req_id, out.token.id) for out in outs] == [(out.req_id, out.token.id) for out in expected]
    assert len(replayed) > 10
    torch.cuda.synchronize()


class FakeGraphs:
    def __init__(self) -> None:
        self.captured: list[StepShape] = []

    def capture(self, examples: Iterable[tuple[StepShape, Tensor]]) -> None:
        self.captured += [shape for shape, _ in examples]


class Recorder:
    def __init__(self) -> None:
        self.states: list[ProgressState] = []

    def show(self, state: ProgressState) -> None:
        self.states.append(state)


def test_the_operator_sees_how_many_graphs_are_captured(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, graphs, recorder = make(folder, "cpu")._runner, FakeGraphs(), Recorder()
    shapes = [StepShape(count, count, has_decodes=True, has_prompts=False) for count in (2, 1)]
    monkeypatch.setattr(runner, "_graphs", graphs)
    monkeypatch.setattr(runner, "_to_capture", lambda: shapes)
    use_output(recorder)

    try:
        runner.capture()
    finally:
        use_output(None)

    assert graphs.captured == shapes
    assert [(state.label, state.done, state.total) for state in recorder.states] == [
        ("CUDA graphs", done, 2) for done in (1, 2, 2)
    ]


def test_every_shape_that_is_captured_is_padded_to_itself() -> None:
    for shape in graph_shapes(100, H200_GRAPHS):
        assert graph_shape_for(shape, H200_GRAPHS) == shape


def test_steps_that_take_longer_than_launching_are_captured_only_where_many_decode() -> None:
    long = [shape for shape in graph_shapes(256, H200_GRAPHS) if shape.tokens > 1024]

    assert {shape.requests for shape in long} == {136, 264}
    assert all(shape.has_decodes and shape.has_prompts for shape in long)
    assert not any(shape.tokens > 1024 for shape in graph_shapes(64, H200_GRAPHS))


def test_a_step_is_padded_to_the_next_shape_or_not_at_all() -> None:
    def shape(tokens: int, requests: int, kind: str) -> StepShape:
        return StepShape(tokens, requests, has_decodes=kind != "prompts", has_prompts=kind != "decodes")

    assert graph_shape_for(shape(3, 3, "decodes"), H200_GRAPHS) == shape(4, 4, "decodes")
    assert graph_shape_for(shape(512, 512, "decodes"), H200_GRAPHS) == shape(512, 512, "decodes")
    assert graph_shape_for(shape(513, 513, "decodes"), H200_GRAPHS) is None
    assert graph_shape_for(shape(100, 1, "prompts"), H200_GRAPHS) == shape(128, 8, "prompts")
    assert graph_shape_for(shape(100, 9, "prompts"), H200_GRAPHS) == shape(128, 24, "both")
    assert graph_shape_for(shape(20 + 65, 22, "both"), H200_GRAPHS) == shape(128, 24, "both")
    assert graph_shape_for(shape(130, 100, "both"), H200_GRAPHS) == shape(256, 136, "both")
    assert graph_shape_for(shape(110, 100, "both"), H200_GRAPHS) == shape(256, 136, "both")
    assert graph_shape_for(shape(600, 1, "prompts"), H200_GRAPHS) == shape(768, 8, "prompts")
    assert graph_shape_for(shape(1600, 1, "prompts"), H200_GRAPHS) is None
    assert graph_shape_for(shape(1250, 250, "both"), H200_GRAPHS) == shape(1280, 264, "both")
    assert graph_shape_for(shape(1000, 190, "both"), H200_GRAPHS) == shape(1024, 264, "both")
    assert graph_shape_for(shape(500, 300, "both"), H200_GRAPHS) is None
