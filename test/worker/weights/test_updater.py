"""What an update says of tensors that no model worker has, and how it reaches the layer for drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightserve.common.basemodel import CheckpointTensor
from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.common.device.cpu import CpuDevice
from lightserve.config import WorkerConfig
from lightserve.httpserver.rl.weight_bodies import InitGroup
from lightserve.messages.weights import (
    CheckFolder,
    CheckTensors,
    FinishLoad,
    JoinTorchGroup,
    LoadFolder,
    ReceiveTensors,
    WeightBuffering,
    WeightSelector,
    WeightTensor,
    WorkerWeightsReply,
)
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.worker.weights.groups import TrainerGroup
from lightserve.worker.weights.updater import WeightUpdater
from test.models.architectures.case import build
from test.models.architectures.vision_language import CASES
from test.models.reloading import places_of
from test.models.tiny import build_model
from test.worker.test_mtp import MODELS as MTP_MODELS, MTP, save_model as save_mtp_model
from test.worker.test_ngram import make as make_llm


def test_the_vision_tower_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tiny = build(next(iter(CASES.values())))
    model = build_model(tiny.config_json, tiny.checkpoint())
    updater = WeightUpdater(WorkerConfig(), model, CpuDevice(), rank=0)
    updater._groups["trainer"] = object()  # type: ignore[assignment]  # nothing is received
    norm = next(one for one in tiny.checkpoint() if one.name.endswith("input_layernorm.weight"))
    names = [norm.name, "model.visual.patch_embed.proj.weight"]

    reply = updater.handle(
        CheckTensors("trainer", [WeightTensor(name, "float32", tuple(norm.tensor.shape)) for name in names])
    )

    assert (reply.error, reply.used) == ("", 1)
    assert "1 tensors of the vision tower are left out" in caplog.text


class Vendor(CpuDevice):
    name = "npu"
    comm_backend = "hccl"


@pytest.mark.parametrize(
    ("backend", "error"),
    [("hccl", ""), ("gloo", ""), ("nccl", "the device npu has no backend nccl; use gloo or hccl")],
)
def test_a_trainer_joins_by_the_collectives_of_the_device(
    monkeypatch: pytest.MonkeyPatch, backend: str, error: str
) -> None:
    joined: list[str] = []
    monkeypatch.setattr(
        "lightserve.worker.weights.updater.TorchGroup", lambda command, *_: joined.append(command.backend)
    )
    tiny = build(next(iter(CASES.values())))
    updater = WeightUpdater(WorkerConfig(), build_model(tiny.config_json, tiny.checkpoint()), Vendor(), rank=0)
    body = InitGroup(master_address="localhost", master_port=1, rank_offset=1, world_size=2, backend=backend)

    reply = updater.handle(JoinTorchGroup("trainer", "localhost", 1, 1, 2, body.backend, timeout_s=1.0))

    assert reply.error == error
    assert joined == ([] if error else [backend])


# the layer for drafts (MTP) of a checkpoint


class Sender(TrainerGroup):
    def __init__(self, tensors: Sequence[CheckpointTensor]) -> None:
        self._left = [tensor.tensor for tensor in tensors]

    def receive(self, into: Tensor) -> None:
        into.copy_(self._left.pop(0))

    def close(self) -> None:
        pass


class Drafting(NamedTuple):
    llm: LLM
    updater: WeightUpdater

    @classmethod
    def of(cls, folder: Path, config: str | None = MTP) -> Drafting:
        llm = make_llm(folder, config, max_req_total_len=128)
        options = WorkerConfig(model_dir=str(folder), device="cpu", data_type="float32", speculative_config=config)
        return cls(llm, WeightUpdater(options, llm.worker.model, CpuDevice(), 0, llm.worker._head))

    def send(
        self,
        tensors: Sequence[CheckpointTensor],
        restarts: bool = False,
        selector: WeightSelector = WeightSelector.ALL,
    ) -> WorkerWeightsReply:
        announced = [
            WeightTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor, _ in tensors
        ]
        self.updater._groups["trainer"] = Sender(tensors)
        checked = self.updater.handle(CheckTensors("trainer", announced, selector))
        if checked.error:
            return checked
        receive = ReceiveTensors("trainer", announced, WeightBuffering.EACH, 0, restarts, selector=selector)
        return self.updater.handle(receive)

    def head_tensors(self) -> dict[str, Tensor]:
        head: Any = self.llm.worker._head
        return {piece.name: piece.into.clone() for piece in head.weights.pieces() if piece.into is not None}


@pytest.fixture(scope="module", params=MTP_MODELS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first = tmp_path_factory.mktemp("first")
    save_mtp_model(first, request.param)
    second = first.parent / f"{first.name}-second"
    shutil.copytree(first, second)
    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(first / "model.safetensors").items()}
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    return first, second


def tensors_of(folder: Path) -> tuple[list[CheckpointTensor], list[CheckpointTensor]]:
    """Those of the model, and those of the layer for drafts."""
    number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    tensors = [tensor._replace(file="update") for tensor in open_checkpoint(resolve(str(folder)))]
    is_draft = [tensor.name.startswith(f"model.layers.{number}.") for tensor in tensors]
    return (
        [tensor for tensor, of_draft in zip(tensors, is_draft, strict=True) if not of_draft],
        [tensor for tensor, of_draft in zip(tensors, is_draft, strict=True) if of_draft],
    )


def test_the_layer_for_drafts_is_left_out_where_nothing_drafts_with_it(folders: tuple[Path, Path]) -> None:
    first, second = folders
    plain = Drafting.of(first, None)
    of_model, of_drafts = tensors_of(second)

    assert plain.send([*of_drafts, *of_model]) == WorkerWeightsReply(missing=0)
    assert plain.updater.handle(FinishLoad()) == WorkerWeightsReply(has_model=True)


def test_a_trainer_replaces_the_layer_for_drafts_with_the_model_or_after_it(folders: tuple[Path, Path]) -> None:
    first, second = folders
    drafting, fresh = Drafting.of(first), Drafting.of(second)
    places, (of_model, of_drafts) = places_of(drafting.llm.worker._head), tensors_of(second)  # type: ignore[arg-type]
    before = drafting.head_tensors()

    assert drafting.send(of_model).missing == 0
    assert drafting.updater.handle(FinishLoad()) == WorkerWeightsReply(has_model=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafting.head_tensors().items())
    assert (drafting.send(of_drafts[:5], restarts=True).missing or 0) > 0
    assert drafting.send(of_drafts[5:]).missing == 0
    assert drafting.updater.handle(FinishLoad()) == WorkerWeightsReply(has_drafts=True)

    expected = fresh.head_tensors()
    assert all(torch.equal(expected[name], tensor) for name, tensor in drafting.head_tensors().items())
    assert not any(torch.equal(before[name], expected[name]) for name in expected if "_proj" in name)
    assert places_of(drafting.llm.worker._head) == places  # type: ignore[arg-type]
    assert (drafting.send([*of_drafts[:5], *of_model], restarts=True).missing or 0) > 0  # not without its rest


def test_a_folder_may_have_the_layer_for_drafts(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    drafting, fresh = Drafting.of(first), Drafting.of(second)
    (tmp_path / "config.json").write_text((second / "config.json").read_text())

    def load(folder: Path) -> None:
        for command in (CheckFolder(str(folder)), LoadFolder(str(folder))):
            reply = drafting.updater.handle(command)
            assert not reply.error, reply

    load(second)
    expected = fresh.head_tensors()
    assert all(torch.equal(expected[name], tensor) for name, tensor in drafting.head_tensors().items())
    of_model, of_drafts = tensors_of(first)
    save_file({name: tensor.contiguous() for name, tensor, _ in of_model}, tmp_path / "model.safetensors")
    load(tmp_path)
    assert all(torch.equal(expected[name], tensor) for name, tensor in drafting.head_tensors().items())
    incomplete = {name: tensor.contiguous() for name, tensor, _ in [*of_model, *of_drafts[1:]]}
    save_file(incomplete, tmp_path / "model.safetensors")
    assert "lacks 1 tensors" in drafting.updater.handle(CheckFolder(str(tmp_path))).error
