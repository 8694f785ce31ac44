"""Columns of a step: declared once, packed on the host, read on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightserve.common.kv.req_manager import ReqManager
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.worker.batch import step_input
from lightserve.worker.batch.infer_batch import InferBatch
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.step_input import Column, Padding, StepShape, columns_of, padded_input
from test.worker.test_step_runner import Driver, make

DECODES = StepShape(8, 8, has_decodes=True, has_prompts=False)
MIXED = StepShape(20, 8, has_decodes=True, has_prompts=True)


@pytest.fixture
def adapter_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new column, declared in one line, with its value in the request."""
    monkeypatch.setattr(step_input, "REQ_COLUMNS", (*step_input.REQ_COLUMNS, Column("adapter_row", "int64", -7)))
    monkeypatch.setattr(InferReq, "adapter_row", property(lambda req: req.req_id + (1 << 40)), raising=False)


def new(req_id: int, length: int) -> NewReq:
    return NewReq(req_id, [1] * length, SamplingParams(temperature=0.5 + req_id), seed=2**62 + req_id)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_declared_column_has_the_values_of_requests_and_the_default_of_padding(
    adapter_rows: None, as_tensor: bool
) -> None:
    batch = InferBatch(ReqManager(8, 40, torch.device("cpu")), 99, torch.device("cpu"))
    for req_id, length in ((3, 4), (5, 1)):
        batch.add(new(req_id, length))

    packed = batch.pack(Step([StepRow(3, [0, 1, 2, 3]), StepRow(5, [4])]), lambda _: MIXED)
    columns = columns_of(torch.from_numpy(packed.inputs) if as_tensor else packed.inputs, packed.shape)

    assert columns.reqs["adapter_row"].tolist() == [3 + (1 << 40), 5 + (1 << 40), *[-7] * 6]
    assert columns.reqs["temperature"].tolist() == [3.5, 5.5, *[0.0] * 6]
    assert columns.reqs["seed"].tolist() == [2**62 + 3, 2**62 + 5, *[0] * 6]
    assert columns.reqs["seq_len"].tolist() == [4, 1, *[0] * 6]
    assert columns.tokens["slot"].tolist() == [0, 1, 2, 3, 4, *[99] * 15]
    assert columns.tokens["position"].tolist() == [0, 1, 2, 3, 0, *[0] * 15]


def test_a_declared_column_reaches_the_device_in_a_real_step(
    folder: str, adapter_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make(folder, "cpu")
    seen: list[torch.Tensor] = []
    run = worker._runner.run

    def noting(*args: Any) -> Any:
        out = run(*args)
        seen.append(out.columns.reqs["adapter_row"])
        return out

    monkeypatch.setattr(worker._runner, "run", noting)
    outs = Driver(worker, seed=0).run(5)

    assert outs
    assert all(isinstance(column, torch.Tensor) and column.dtype == torch.int64 for column in seen)
    assert {row - (1 << 40) for column in seen for row in column.tolist()} <= set(range(12))


@pytest.mark.parametrize("shape", [DECODES, MIXED, MIXED._replace(has_shared=True), StepShape(1, 1, True, False)])
def test_every_column_begins_at_16_bytes_and_overlaps_no_other(shape: StepShape, adapter_rows: None) -> None:
    inputs, columns = padded_input(shape, Padding(row=11, slot=99))
    views = [*columns.tokens.values(), *columns.reqs.values()]
    views += [] if columns.groups is None else [columns.groups]

    for number, view in enumerate(views):
        view[...] = number

    assert all((view.ctypes.data - inputs.ctypes.data) % 16 == 0 for view in views)
    assert all((view == number).all() for number, view in enumerate(views))


def test_padding_of_decode_steps_has_one_token_per_request_and_others_have_none() -> None:
    _, decodes = padded_input(DECODES, Padding(row=11, slot=99))
    _, mixed = padded_input(MIXED, Padding(row=11, slot=99))

    assert decodes.reqs["start"].tolist() == list(range(8))
    assert decodes.reqs["seq_len"].tolist() == [1] * 8
    assert mixed.reqs["start"].tolist() == [20] * 8
    assert mixed.reqs["seq_len"].tolist() == [0] * 8
    assert set(decodes.tokens["row"].tolist()) == set(decodes.reqs["row"].tolist()) == {11}
