"""Groups of requests that share a prefix, compared with brute force. Grouping may not change a worker's tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightserve.common import ops
from lightserve.common.device import H200, H200_GRAPHS
from lightserve.common.kv.req_manager import ReqManager
from lightserve.common.parallel import Parallel
from lightserve.common.triton_kernel import _gpu
from lightserve.config import WorkerConfig
from lightserve.messages.params import GenerationParams, SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.worker import captured_shapes, step_runner
from lightserve.worker.batch import infer_batch, shared_prefixes
from lightserve.worker.batch.infer_batch import InferBatch
from lightserve.worker.batch.shared_prefixes import Arrangement, SharedPrefixes
from lightserve.worker.batch.step_input import StepShape, columns_of
from lightserve.worker.captured_shapes import graph_shape_for, graph_shapes
from lightserve.worker.worker import ModelWorker

Prefixes = dict[int, tuple[int, ...]]  # slots by request
SYSTEM_LEN = 40  # tokens of a system prompt


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes and groups of a size that brute force can count."""
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED", 2)
    monkeypatch.setattr(shared_prefixes, "MIN_MEMBERS", 2)
    monkeypatch.setattr(infer_batch, "MIN_MEMBERS", 2)
    monkeypatch.setattr(infer_batch, "MIN_SAVED_BY_FEW", 0)


def common_len(prefixes: Sequence[tuple[int, ...]]) -> int:
    columns = enumerate(zip(*prefixes, strict=False))
    return next((i for i, slots in columns if len(set(slots)) > 1), min(map(len, prefixes)))


def most_saved(prefixes: Sequence[tuple[int, ...]]) -> int:
    """By disjoint groups, of which each holds all requests with some prefix."""
    groups = set()
    for pair in combinations(prefixes, 2):
        shared = common_len(pair)
        if shared >= 2:
            sharers = frozenset(i for i, slots in enumerate(prefixes) if slots[:shared] == pair[0][:shared])
            groups.add((sharers, shared))
    best = 0
    for count in range(1, len(prefixes) // 2 + 1):
        for some in combinations(groups, count):
            members = [member for group, _ in some for member in group]
            if len(members) == len(set(members)):
                best = max(best, sum((len(group) - 1) * shared for group, shared in some))
    return best


def check(found: Arrangement, reqs: list[int], prefixes: Prefixes) -> None:
    assert sorted(found.order) == list(range(len(reqs)))
    ordered = [prefixes[reqs[place]] for place in found.order]
    ends = [0]
    for first, requests, shared in found.groups:
        assert first == ends[-1]
        assert requests >= 2
        assert shared >= 2
        assert common_len(ordered[first : first + requests]) >= shared
        ends.append(first + requests)
    behind = found.order[ends[-1] :]
    assert behind == sorted(behind)
    saved = sum((requests - 1) * shared for _, requests, shared in found.groups)
    assert saved >= most_saved([prefixes[req] for req in reqs])


@st.composite
def trees(draw: st.DrawFn) -> Prefixes:
    """Requests of a radix tree: each takes the first slots of another, and own ones from there on."""
    fresh = iter(draw(st.permutations(range(60))))
    prefixes: Prefixes = {}
    for req in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([(), *prefixes.values()]))
        taken = parent[: draw(st.integers(0, len(parent)))]
        prefixes[req] = taken + tuple(next(fresh) for _ in range(draw(st.integers(1, 5))))
    return prefixes


@settings(max_examples=200, deadline=None)
@given(prefixes=trees(), data=st.data())
def test_groups_follow_requests_that_come_and_leave(prefixes: Prefixes, data: st.DataObject) -> None:
    order: SharedPrefixes[int] = SharedPrefixes()
    for req, slots in prefixes.items():
        order.add(req, np.array(slots, dtype=np.int32))
    check(order.arrange(list(prefixes)), list(prefixes), prefixes)

    step = data.draw(st.lists(st.sampled_from(list(prefixes)), unique=True, min_size=1))
    check(order.arrange(step), step, prefixes)

    for req in data.draw(st.lists(st.sampled_from(list(prefixes)), unique=True)):
        order.discard(req)
        prefixes = {**prefixes, req: (-1 - req,)}  # what is not there shares nothing
        check(order.arrange(step), step, prefixes)


def test_a_common_beginning_that_is_too_short_hides_no_longer_one() -> None:
    """As where all chats begin with the same few tokens of the template, and some with the same system prompt."""
    order: SharedPrefixes[int] = SharedPrefixes()
    for req, slots in enumerate([(0, 1, 2, 9), (0, 5, 6, 7), (0, 1, 2, 3), (0, 5, 6, 8), (0, 4)]):
        order.add(req, np.array(slots, dtype=np.int32))

    found = order.arrange([0, 1, 2, 3, 4])

    assert found.groups == [(0, 2, 3), (2, 2, 3)]
    assert {frozenset(found.order[:2]), frozenset(found.order[2:4])} == {frozenset({0, 2}), frozenset({1, 3})}
    assert found.order[4] == 4


def test_a_few_that_share_more_leave_the_group_of_all() -> None:
    order: SharedPrefixes[int] = SharedPrefixes()
    long = tuple(range(40))
    for req in range(8):
        order.add(req, np.array((*long[: 40 if req < 3 else 10], 100 + req), dtype=np.int32))

    found = order.arrange(list(range(8)))

    assert found.groups == [(0, 3, 40), (3, 5, 10)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_holds_no_more_groups_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(shared_prefixes, "MAX_GROUPS", count)
    order: SharedPrefixes[int] = SharedPrefixes()
    for req in range(10):
        order.add(req, np.array([*range(req // 2 * 100, req // 2 * 100 + 10 + req // 2), 1000 + req], dtype=np.int32))

    found = order.arrange(list(range(10)))

    assert [group.shared for group in found.groups] == [14, 13, 12][:count]
    assert sorted(found.order) == list(range(10))


def test_the_same_step_is_arranged_once() -> None:
    order: SharedPrefixes[int] = SharedPrefixes()
    for req in range(4):
        order.add(req, np.array([1, 2, 3, 10 + req], dtype=np.int32))
    first = order.arrange([0, 1, 2])

    assert order.arrange([0, 1, 2]) is first
    assert order.arrange([0, 1, 2, 3]).groups == [(0, 4, 3)]
    order.discard(1)
    assert order.arrange([0, 2, 3]).groups == [(0, 3, 3)]


def as_it_is(shape: StepShape) -> StepShape:
    return shape


def new(req_id: int, length: int, cached: Sequence[int] = ()) -> NewReq:
    return NewReq(req_id, [1] * length, SamplingParams(), seed=req_id, cached_slots=list(cached))


def make_batch(**options: bool) -> InferBatch:
    return InferBatch(ReqManager(8, 40, torch.device("cpu")), 99, torch.device("cpu"), **options)


def chatting_batch() -> InferBatch:
    """Requests 0 and 2 decode after the same 5 slots, and 1 after others; request 3 shares them too."""
    batch = make_batch()
    batch.add(new(0, 6))
    batch.add(new(1, 6, [90]))
    batch.pack(Step([StepRow(0, [0, 1, 2, 3, 4, 5]), StepRow(1, [60, 61, 62, 63, 64])]), as_it_is)
    batch.add(new(2, 6, [0, 1, 2, 3, 4]))
    batch.pack(Step([StepRow(2, [8])]), as_it_is)
    batch.add(new(3, 9, [0, 1, 2, 3, 4, 5]))
    return batch


def test_a_step_with_prompts_puts_the_decodes_of_groups_in_front() -> None:
    batch = chatting_batch()
    rows = [StepRow(1, [7]), StepRow(3, [9, 10]), StepRow(0, [6]), StepRow(2, [15])]
    packed = batch.pack(Step(rows, token_ids=[11, 31, 32, 1, 21]), as_it_is)
    columns = columns_of(packed.inputs, packed.shape)

    assert packed.shape == StepShape(5, 4, has_decodes=True, has_prompts=True, has_shared=True)
    assert [req.req_id for req in packed.reqs] == [0, 2, 1, 3]
    assert columns.tokens["slot"].tolist() == [6, 15, 7, 9, 10]
    assert columns.tokens["token_id"].tolist() == [1, 21, 11, 31, 32]
    assert columns.tokens["position"].tolist() == [6, 6, 6, 6, 7]
    assert columns.reqs["start"].tolist() == [0, 1, 2, 3]
    assert columns.reqs["seq_len"].tolist() == [7, 7, 7, 8]
    assert columns.groups.tolist() == [[0, 2, 5, 0], *[[0] * 4] * 7]


def test_a_captured_step_without_groups_reads_every_prefix() -> None:
    def without_groups(shape: StepShape) -> StepShape:
        return StepShape(8, 6, has_decodes=True, has_prompts=True)

    batch = chatting_batch()
    packed = batch.pack(Step([StepRow(0, [6]), StepRow(2, [15]), StepRow(3, [9, 10])]), without_groups)

    assert columns_of(packed.inputs, packed.shape).groups is None
    assert columns_of(packed.inputs, packed.shape).tokens["slot"].tolist()[:4] == [6, 15, 9, 10]


def test_a_decode_step_names_its_groups_and_puts_their_rows_side_by_side() -> None:
    batch = chatting_batch()
    batch.pack(Step([StepRow(0, [6]), StepRow(1, [7]), StepRow(3, [9, 10, 16])]), as_it_is)

    packed = batch.pack(Step([StepRow(1, [11]), StepRow(2, [12]), StepRow(0, [13]), StepRow(3, [14])]), as_it_is)
    columns = columns_of(packed.inputs, packed.shape)

    assert packed.shape == StepShape(4, 4, has_decodes=True, has_prompts=False, has_shared=True)
    assert [req.req_id for req in packed.reqs] == [0, 3, 2, 1]
    assert columns.tokens["slot"].tolist() == [13, 14, 12, 11]
    assert columns.reqs["row"].tolist() == [req.row for req in packed.reqs]
    assert columns.groups.tolist() == [[0, 3, 5, 0], *[[0] * 4] * 7]


def test_a_request_that_enters_again_has_other_slots() -> None:
    batch = make_batch()
    for req_id in range(3):
        batch.add(new(req_id, 4, [0, 1, 2]))
    steps = iter(range(10, 90))
    first = batch.pack(Step([StepRow(req_id, [next(steps)]) for req_id in range(3)]), as_it_is)
    batch.remove(1)
    batch.add(new(1, 5, [70]))
    batch.pack(Step([StepRow(1, [next(steps) for _ in range(4)])]), as_it_is)

    packed = batch.pack(Step([StepRow(req_id, [next(steps)]) for req_id in range(3)]), as_it_is)

    groups = [columns_of(step.inputs, step.shape).groups for step in (first, packed)]
    assert [group[0].tolist() for group in groups] == [[0, 3, 3, 0], [0, 2, 3, 0]]
    assert [req.req_id for req in packed.reqs] == [0, 2, 1]
    for req_id in range(3):
        batch.remove(req_id)
    assert not batch._prefixes._reqs


@pytest.mark.parametrize(("most_not_worth_it", "shares"), [(6, False), (5, True)])
def test_few_requests_share_a_prefix_only_if_that_saves_much(
    most_not_worth_it: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer_batch, "MIN_SAVED_BY_FEW", most_not_worth_it + 1)
    batch = make_batch()
    for req_id in range(3):
        batch.add(new(req_id, 4, [0, 1, 2]))

    packed = batch.pack(Step([StepRow(req_id, [20 + req_id]) for req_id in range(3)]), as_it_is)

    assert packed.shape.has_shared == shares


def test_a_batch_that_is_to_share_nothing_keeps_its_order() -> None:
    batch = make_batch(shares_prefixes=False)
    for req_id in range(3):
        batch.add(new(req_id, 4, [0, 1, 2] if req_id != 1 else [5]))
    batch.pack(Step([StepRow(1, [6, 7])]), as_it_is)

    packed = batch.pack(Step([StepRow(req_id, [20 + req_id]) for req_id in range(3)]), as_it_is)

    assert [req.req_id for req in packed.reqs] == [0, 1, 2]
    assert not packed.shape.has_shared


def test_steps_of_some_size_are_captured_for_groups() -> None:
    shared = [shape for shape in graph_shapes(100, H200_GRAPHS) if shape.has_shared]
    mixed = [shape for shape in shared if shape.has_prompts]

    assert {shape.requests for shape in shared if shape not in mixed} == {4, 8, 16, 24, 32, 48, 64, 96, 128}
    assert {shape.tokens for shape in mixed} == {64, 128, 256, 384, 512}
    assert all(shape.has_decodes for shape in mixed)
    assert not any(shape.has_shared for shape in graph_shapes(100, H200_GRAPHS, shares_prefixes=False))
    assert graph_shape_for(StepShape(17, 17, True, False, has_shared=True), H200_GRAPHS) == StepShape(
        24, 24, True, False, has_shared=True
    )
    assert graph_shape_for(StepShape(200, 60, True, True, has_shared=True), H200_GRAPHS) == StepShape(
        256, 72, True, True, has_shared=True
    )


def make(folder: str, device: str) -> ModelWorker:
    config = WorkerConfig(
        model_dir=folder,
        device=device,
        data_type="float32",
        max_total_token_num=1200,
        max_req_total_len=100,
        running_max_req_size=12,
    )
    return ModelWorker(config, resolve(folder), Parallel())


class Chats:
    """Requests with one of two system prompts that come, decode, are paused and go on, as a router would plan it."""

    def __init__(self, worker: ModelWorker, seed: int) -> None:
        self._worker = worker
        self._rng = random.Random(seed)
        self._free = iter(self._rng.sample(range(1200), 1200))
        self._prompts = [self._random_ids(SYSTEM_LEN) for _ in range(2)]
        self._cached: dict[int, list[int]] = {}  # slots of a system prompt, once one has computed it
        self._lens: dict[int, int] = {}  # of prompts
        self._tokens: dict[int, list[int]] = {}
        self._slots: dict[int, list[int]] = {}  # of those that run

    def run(self, steps: int) -> dict[int, list[int]]:
        """All tokens of each request."""
        for _ in range(steps):
            paused = [req for req in self._slots if self._rng.random() < 0.05]
            for req in paused:
                del self._slots[req]
            entered = [self._enter(req) for req in self._next_reqs()]
            rows = [StepRow(req, self._next_slots(req)) for req in self._slots]
            for out in self._worker.run(Step(rows, entered, paused)).tokens:
                self._tokens[out.req_id].append(out.token.id)
        self._worker.run(Step([], free=list(self._slots)))
        return self._tokens

    def _next_reqs(self) -> list[int]:
        known = len(self._tokens)
        paused = [req for req in self._tokens if req not in self._slots and self._rng.random() < 0.5]
        return [*paused, *range(known, min(known + self._rng.randint(0, 4), 12))]

    def _enter(self, req: int) -> NewReq:
        if req not in self._tokens:
            self._tokens[req] = [*self._prompts[req % 2], *self._random_ids(self._rng.randint(1, 6))]
            self._lens[req] = len(self._tokens[req])
        ids, cached = list(self._tokens[req]), self._cached.get(req % 2, [])
        self._slots[req] = list(cached)
        sampling = SamplingParams(temperature=0.0 if req % 3 else 0.9, frequency_penalty=float(req == 5))
        return NewReq(req, ids, sampling, seed=req, cached_slots=cached, output_len=len(ids) - self._lens[req])

    def _next_slots(self, req: int) -> list[int]:
        slots = [next(self._free) for _ in range(len(self._tokens[req]) - len(self._slots[req]))]
        self._slots[req] += slots
        self._cached.setdefault(req % 2, self._slots[req][:SYSTEM_LEN])
        return slots

    def _random_ids(self, count: int) -> list[int]:
        return [self._rng.randrange(128) for _ in range(count)]


def run_both(
    worker: ModelWorker, steps: int, monkeypatch: pytest.MonkeyPatch, attention: str | None = None
) -> list[StepShape]:
    """Chats say the same without groups and with, there by this backend's attention; returns the steps with groups."""
    shapes: list[StepShape] = []
    pack = InferBatch.pack

    def noting(self: InferBatch, *args: object) -> infer_batch.PackedStep:
        packed = pack(self, *args)  # type: ignore[arg-type]
        shapes.append(packed.shape)
        return packed

    monkeypatch.setattr(InferBatch, "pack", noting)
    worker._batch.shares_prefixes = False
    expected = Chats(worker, seed=3).run(steps)
    assert not any(shape.has_shared for shape in shapes)
    worker._batch.shares_prefixes = True
    if attention is not None:
        ops.token_attention.select([attention])
    assert Chats(worker, seed=3).run(steps) == expected
    return [shape for shape in shapes if shape.has_shared]


def test_the_order_of_grouped_rows_changes_no_token(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run_both(make(folder, "cpu"), 25, monkeypatch)) > 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
def test_attention_that_reads_prefixes_once_changes_no_token(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter runs programs one after the other
    monkeypatch.setattr(_gpu, "active", dataclasses.replace(H200, multiprocessors=2))

    try:
        shared = run_both(make(folder, "cpu"), 10, monkeypatch, attention="triton")
    finally:
        ops.use_backend(ops.REFERENCE)

    assert len(shared) > 1


@pytest.mark.gpu
def test_captured_steps_with_groups_change_no_token(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_shapes, "MIN_MEMBERS", 2)
    worker = make(folder, "cuda")
    worker.capture()

    shared = run_both(worker, 25, monkeypatch)

    assert worker._runner._graphs is not None
    assert sum(shape in worker._runner._graphs for shape in shared) > 5


def test_the_prefix_cache_gives_requests_slots_by_which_they_group(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED", 10)
    options: dict[str, Any] = {"device": "cpu", "data_type": "float32", "load_format": "dummy"}
    llm = LLM(folder, max_total_token_num=1200, max_req_total_len=100, running_max_req_size=12, **options)
    systems = [[7, 8, 9, *range(i, i + SYSTEM_LEN)] for i in (20, 80)]  # behind the first tokens of a template
    prompts = [[*systems[i % 2], i, *range(i % 5)] for i in range(12)]
    wanted = [GenerationParams.of(max_new_tokens=5 + i, temperature=0.0, ignore_eos=True) for i in range(12)]
    shared: list[set[int]] = []
    run = llm.worker._runner.run

    def noting(inputs: np.ndarray, shape: StepShape, *args: Any) -> step_runner.StepOut:
        if shape.has_shared:
            groups = columns_of(inputs, shape).groups
            shared.append(set(groups[groups[:, 1] > 0, 2].tolist()))
        return run(inputs, shape, *args)

    monkeypatch.setattr(llm.worker._runner, "run", noting)
    grouped = llm.generate(prompts, wanted)
    llm.worker._batch.shares_prefixes = False
    alone = [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, wanted, strict=True)]

    assert [one.token_ids for one in grouped] == [one.token_ids for one in alone]
    assert {SYSTEM_LEN + 3} in shared
