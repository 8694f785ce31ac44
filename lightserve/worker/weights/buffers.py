"""How the tensors of a trainer lie in its broadcasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightserve.common.basemodel import CheckpointTensor
from lightserve.common.checkpoint.reader import DTYPES
from lightserve.errors import InvalidRequestError
from lightserve.messages.weights import WeightBuffering, WeightTensor

KNOWN_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
SOURCE = "update"  # in errors, where a checkpoint has the name of its file


def dtype_of(tensor: WeightTensor) -> torch.dtype:
    dtype = KNOWN_DTYPES.get(tensor.dtype.removeprefix("torch."))
    if dtype is None:
        known = ", ".join(sorted(KNOWN_DTYPES))
        raise InvalidRequestError(f"{tensor.name}: the dtype {tensor.dtype[:40]!r} is not known; known are {known}")
    return dtype


def metadata(tensors: Sequence[WeightTensor]) -> Iterator[CheckpointTensor]:
    """What is announced, on the meta device."""
    for tensor in tensors:
        if any(size < 0 for size in tensor.shape):
            raise InvalidRequestError(f"{tensor.name}: the shape {tensor.shape} has a negative size")
        empty = torch.empty(tensor.shape, dtype=dtype_of(tensor), device="meta")
        yield CheckpointTensor(tensor.name, empty, SOURCE)


def received(
    tensors: Sequence[WeightTensor],
    buffering: WeightBuffering,
    buffer_bytes: int,
    receive: Callable[[Tensor], None],
    device: torch.device,
) -> Iterator[list[CheckpointTensor]]:
    """The tensors of the next broadcasts, in the order in which they come. ``receive`` fills a tensor."""
    for group in _groups(tensors, buffering, buffer_bytes):
        if buffering is WeightBuffering.EACH:
            (announced,) = group
            tensor = torch.empty(announced.shape, dtype=dtype_of(announced), device=device)
            receive(tensor)
            yield [CheckpointTensor(announced.name, tensor, SOURCE)]
        else:
            buffer = torch.empty(sum(map(num_bytes, group)), dtype=torch.uint8, device=device)
            receive(buffer)
            yield list(_cut(buffer, group))


def num_bytes(tensor: WeightTensor) -> int:
    return math.prod(tensor.shape) * dtype_of(tensor).itemsize


def _groups(
    tensors: Sequence[WeightTensor], buffering: WeightBuffering, buffer_bytes: int
) -> Iterator[Sequence[WeightTensor]]:
    """The tensors of each broadcast."""
    if buffering is WeightBuffering.BUCKET:
        yield tensors
        return
    group: list[WeightTensor] = []
    size = 0
    for tensor in tensors:
        group.append(tensor)
        size += num_bytes(tensor)
        if buffering is WeightBuffering.EACH or size > buffer_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _cut(buffer: Tensor, tensors: Sequence[WeightTensor]) -> Iterator[CheckpointTensor]:
    begin = 0
    for announced in tensors:
        dtype, end = dtype_of(announced), begin + num_bytes(announced)
        content = buffer[begin:end]
        if begin % dtype.itemsize:  # a view of another type has to be aligned
            content = content.clone()
        yield CheckpointTensor(announced.name, content.view(dtype).view(announced.shape), SOURCE)
        begin = end
