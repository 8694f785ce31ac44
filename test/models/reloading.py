"""Sends other weights to a model, and checks that it then is like a new one whose tensors did not move.

A process of its own broadcasts them by gloo, as a trainer does.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightserve.common.basemodel import CheckpointTensor, TpPartBaseModel
from lightserve.common.device.cpu import CpuDevice
from lightserve.config import WorkerConfig
from lightserve.messages.weights import (
    CheckTensors,
    FinishLoad,
    JoinTorchGroup,
    ReceiveTensors,
    WeightBuffering,
    WeightTensor,
    WorkerWeightsCommand,
    WorkerWeightsReply,
)
from lightserve.worker.weights.groups import TorchGroup
from lightserve.worker.weights.updater import WeightUpdater
from test.models.session import Session
from test.tensor_sender import TensorSender

PROMPTS = {0: [5, 17, 3, 99, 42, 8, 1], 1: [77, 2, 130], 2: [64]}
NOT_WALKED = (str, bytes, int, float, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.device)
PART = 3  # tensors that come together
TRAINER = "trainer"  # its group
TRAINER_TIMEOUT_S = 60.0
BUFFERINGS = tuple(WeightBuffering)  # in turn
LAYER = re.compile(r"(?<=\.)[01](?=\.)")

Build = Callable[[Iterator[CheckpointTensor]], TpPartBaseModel]
Compute = Callable[[TpPartBaseModel], Tensor]


class Place(NamedTuple):
    """Where a tensor is, and how a kernel reads it."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def logits_of(model: TpPartBaseModel) -> Tensor:
    session = Session(model)
    return torch.cat([session.step(PROMPTS), session.step({0: [11], 1: [12, 13], 2: [14]})])


def assert_reloads(
    build: Build, first: list[CheckpointTensor], second: list[CheckpointTensor], compute: Compute = logits_of
) -> None:
    model = build(iter(first))
    logits, places = compute(model), places_of(model)

    load_in_parts(model, second)

    assert_same_places(places_of(model), places)
    expected = compute(build(iter(second)))
    assert expected.isfinite().all()
    assert not torch.equal(expected, logits)
    assert torch.equal(compute(model), expected)

    model.load_weights(iter(first))

    assert torch.equal(compute(model), logits)
    assert_same_places(places_of(model), places)


def load_in_parts(model: TpPartBaseModel, tensors: list[CheckpointTensor]) -> None:
    """As from a trainer, which says first what comes, and sends a few tensors at a time."""
    sender, group = trainer()
    updater = WeightUpdater(WorkerConfig(), model, CpuDevice(), rank=0)
    updater._groups[TRAINER] = group
    parts = [tensors[begin : begin + PART] for begin in range(0, len(tensors), PART)]
    ways = [BUFFERINGS[number % len(BUFFERINGS)] for number in range(len(parts))]
    broadcasts = [names for part, way in zip(parts, ways, strict=True) for names in broadcasts_of(part, way)]
    assert sum(handled(updater, CheckTensors(TRAINER, announced(part))).used for part in parts) > 0
    sender.send({one.name: one.tensor for one in tensors}, broadcasts)
    for part, way in zip(parts, ways, strict=True):
        reply = handled(updater, ReceiveTensors(TRAINER, announced(part), way))
    assert reply.missing == 0
    handled(updater, FinishLoad())


@cache
def trainer() -> tuple[TensorSender, TorchGroup]:
    """It serves all tests of this process, and ends with it."""
    sender = TensorSender()
    join = JoinTorchGroup(TRAINER, "127.0.0.1", sender.port, 1, 2, "gloo", TRAINER_TIMEOUT_S)
    return sender, TorchGroup(join, 0, torch.device("cpu"))


def handled(updater: WeightUpdater, command: WorkerWeightsCommand) -> WorkerWeightsReply:
    reply = updater.handle(command)
    assert not reply.error, reply.error
    return reply


def announced(tensors: list[CheckpointTensor]) -> list[WeightTensor]:
    return [
        WeightTensor(one.name, str(one.tensor.dtype).removeprefix("torch."), tuple(one.tensor.shape)) for one in tensors
    ]


def broadcasts_of(part: list[CheckpointTensor], way: WeightBuffering) -> list[list[str]]:
    """The names in each. Of packed ones, every tensor fills the buffer, which has no bytes."""
    names = [one.name for one in part]
    return [names] if way is WeightBuffering.BUCKET else [[name] for name in names]


def assert_same_places(found: Mapping[str, Place | int], expected: Mapping[str, Place | int]) -> None:
    assert expected
    changed = {name for name in {*found, *expected} if found.get(name) != expected.get(name)}
    assert not changed


def places_of(model: TpPartBaseModel) -> dict[str, Place | int]:
    """Of every tensor, and of every struct of the C library, that the model refers to."""
    return dict(_places("model", model, set()))


def _places(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Place | int]]:
    if isinstance(value, Tensor):
        yield name, Place(value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    elif isinstance(value, ctypes.Structure):
        yield name, ctypes.addressof(value)
    elif not isinstance(value, NOT_WALKED) and id(value) not in seen:
        seen.add(id(value))
        for key, member in _members(value):
            yield from _places(f"{name}.{key}", member, seen)


def _members(value: Any) -> Iterable[tuple[object, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value))
    slots = {slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())}
    named = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
    return list({**named, **getattr(value, "__dict__", {})}.items())


def random_tensors(tensors: Iterable[CheckpointTensor], seed: int = 1) -> list[CheckpointTensor]:
    """Other numbers for a checkpoint in floats."""
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * 0.15
        return (noise + (1 if tensor.ndim == 1 else 0)).to(tensor.dtype)

    return [one._replace(tensor=other(one.tensor)) for one in tensors]


def other_tensors(tensors: Iterable[CheckpointTensor]) -> list[CheckpointTensor]:
    """Another checkpoint in any format: layers 0 and 1 change places, vectors in floats their order.

    The inputs of linears with act-order get another order.
    """
    by_name = {one.name: one.tensor for one in tensors}

    def other(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("g_idx"):
            is_in_order = torch.equal(tensor, tensor.sort().values)
            return tensor if is_in_order else tensor.flip(0)
        swapped = by_name.get(LAYER.sub(lambda match: str(1 - int(match[0])), name, count=1), tensor)
        found = swapped if swapped.shape == tensor.shape and swapped.dtype == tensor.dtype else tensor
        is_vector = found.ndim == 1 and found.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return found.flip(0) if is_vector and name.endswith(("norm.weight", "bias")) else found

    return [CheckpointTensor(name, other(name, tensor), "memory") for name, tensor in by_name.items()]
