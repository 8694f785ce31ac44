"""Which rows of recurrent states a step reads and writes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightserve.common import ops
from lightserve.common.kv.req_manager import ReqManager
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.worker.batch import infer_batch
from lightserve.worker.batch.infer_batch import InferBatch, PackedStep
from lightserve.worker.batch.state_rows import StateColumns
from lightserve.worker.batch.step_input import Padding, StepShape, columns_of, padded_input

CPU = torch.device("cpu")


def new(req_id: int, length: int, cached: list[int], held: list[int]) -> NewReq:
    return NewReq(req_id, [1] * length, SamplingParams(), 0, cached_slots=cached, group_slots=(held,))


def make_batch() -> InferBatch:
    batch = InferBatch(ReqManager(8, 4000, CPU), 9999, CPU)
    batch.enable_states()
    return batch


def states_of(packed: PackedStep) -> StateColumns:
    states = columns_of(packed.inputs, packed.shape, has_states=True).states
    assert states is not None
    return states


def as_it_is(shape: StepShape) -> StepShape:
    return shape


def test_a_request_reads_the_row_that_it_wrote_last() -> None:
    batch = make_batch()
    batch.add(new(0, 5, [], []))
    batch.add(new(1, 5, [0, 1], [17]))

    first = states_of(
        batch.pack(Step([StepRow(0, [2, 3, 4, 5, 6]), StepRow(1, [7, 8])], group_slots=([3, 4],)), as_it_is)
    )
    batch.add(new(2, 5, [0, 1], [17]))
    rows = [StepRow(1, [9]), StepRow(0, [10]), StepRow(2, [11, 12])]
    second = states_of(batch.pack(Step(rows, group_slots=([4, 5, 6],)), as_it_is))

    assert first.read_row.tolist() == [ops.NO_ROW, 17]
    assert first.write_row.tolist() == [3, 4]
    assert first.start.tolist() == [0, 5, 7]
    assert second.read_row.tolist() == [4, 3, 17]
    assert second.write_row.tolist() == [4, 5, 6]
    assert second.start.tolist() == [0, 1, 2, 4]


def test_a_request_that_enters_again_does_not_read_its_old_row() -> None:
    batch = make_batch()
    batch.add(new(0, 5, [], []))
    batch.pack(Step([StepRow(0, [0, 1, 2, 3, 4])], group_slots=([3],)), as_it_is)
    batch.remove(0)
    batch.add(new(0, 5, [], []))

    packed = batch.pack(Step([StepRow(0, [0, 1, 2, 3, 4])], group_slots=([1],)), as_it_is)

    assert states_of(packed).read_row.tolist() == [ops.NO_ROW]


@pytest.mark.parametrize("shape", [StepShape(8, 8, True, False), StepShape(20, 8, True, True)])
def test_padding_reads_and_writes_no_row_and_has_no_token_of_a_request(shape: StepShape) -> None:
    batch = make_batch()
    for req_id in range(3):
        batch.add(new(req_id, 3, [0, 1], [req_id]))
    chunks = [StepRow(req_id, [10 + req_id]) for req_id in range(3)]

    states = states_of(batch.pack(Step(chunks, group_slots=([5, 6, 7],)), lambda _: shape))

    assert states.start.tolist() == ([0, 1, 2, 3, 3, 3, 3, 3, 3] if shape.has_prompts else list(range(9)))
    assert states.read_row.tolist() == [0, 1, 2, *[ops.NO_ROW] * 5]
    assert states.write_row.tolist() == [5, 6, 7, *[ops.NO_ROW] * 5]


def test_decodes_that_share_a_prefix_keep_their_rows_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_batch, "FEW_REQUESTS", 0)
    shared, batch, rng = list(range(300)), make_batch(), random.Random(0)
    for req_id in range(8):
        own = shared if req_id % 2 else list(range(1000 * req_id, 1000 * req_id + 300))
        batch.add(new(req_id, 301, own, [req_id]))
        batch.pack(Step([StepRow(req_id, [400 + req_id])], group_slots=([20 + req_id],)), as_it_is)
    order = rng.sample(range(8), 8)

    packed = batch.pack(
        Step([StepRow(req_id, [500 + req_id]) for req_id in order], group_slots=([40 + req_id for req_id in order],)),
        as_it_is,
    )

    req_ids = [req.req_id for req in packed.reqs]
    assert packed.shape.has_shared
    assert req_ids != order
    assert states_of(packed).read_row.tolist() == [20 + req_id for req_id in req_ids]
    assert states_of(packed).write_row.tolist() == [40 + req_id for req_id in req_ids]


def test_a_chunk_writes_its_snapshot_to_one_more_row() -> None:
    batch = make_batch()
    batch.add(new(0, 5, [], []))
    batch.add(new(1, 5, [0, 1], [17]))
    rows = [StepRow(0, [2, 3, 4, 5, 6]), StepRow(1, [7, 8])]

    states = states_of(batch.pack(Step(rows, group_slots=([3, 4, 9],), snapshots=[1, 1]), as_it_is))
    after = states_of(batch.pack(Step([StepRow(1, [10])], group_slots=([4],)), as_it_is))

    assert states.write_row.tolist() == [3, 4]
    assert states.snapshot_row.tolist() == [ops.NO_ROW, 9]
    assert states.snapshot_len.tolist() == [0, 1]
    assert after.read_row.tolist() == [4]
    assert after.snapshot_row.tolist() == [ops.NO_ROW]


@pytest.mark.parametrize("requests", [1, 3, 8])
def test_the_columns_of_states_overlap_no_others_and_begin_at_16_bytes(requests: int) -> None:
    shape = StepShape(9, requests, has_decodes=True, has_prompts=True, has_shared=True, lora_slots=2)
    inputs, columns = padded_input(shape, Padding(row=11, slot=99, group_slots=(7,), has_states=True))
    assert columns.states is not None
    views = [*columns.tokens.values(), *columns.reqs.values(), columns.groups, columns.lora_rows, columns.lora_groups]
    views += [*columns.states, *columns.group_slots]

    for number, view in enumerate(views):
        view[...] = number

    assert [len(view) for view in columns.states] == [requests + 1, *[requests] * 4]
    assert all((view.ctypes.data - inputs.ctypes.data) % 16 == 0 for view in views)
    assert all((view == number).all() for number, view in enumerate(views))


def test_a_model_without_states_has_no_columns_for_them() -> None:
    shape = StepShape(9, 3, has_decodes=True, has_prompts=True)
    plain, with_states = (padded_input(shape, Padding(1, 2, has_states=has_states)) for has_states in (False, True))

    assert plain[1].states is None
    assert np.array_equal(plain[0], with_states[0][: len(plain[0])])


def test_a_request_with_drafts_writes_one_row() -> None:
    batch = make_batch()
    batch.add(new(0, 3, [0, 1], [4]))
    step = Step([], decode_ids=[0], decode_slots=[2, 3], slot_counts=[2], draft_counts=[1], group_slots=([5],))

    states = states_of(batch.pack(step, as_it_is))

    assert (states.start.tolist(), states.read_row.tolist(), states.write_row.tolist()) == ([0, 2], [4], [5])
