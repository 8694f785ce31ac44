"""Tensors lie in a trainer's broadcasts as vLLM and SGLang put them there."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightserve.errors import InvalidRequestError
from lightserve.messages.weights import WeightBuffering, WeightTensor
from lightserve.worker.weights.buffers import metadata, received

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)


def random_weights(seed: int) -> dict[str, Tensor]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shapes = [tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3))) for _ in range(12)]
    return {f"w{i}": torch.randn(shape).to(rng.choice(DTYPES)) for i, shape in enumerate(shapes)}


def announced(weights: dict[str, Tensor]) -> list[WeightTensor]:
    return [
        WeightTensor(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
        for name, weight in weights.items()
    ]


def as_bytes(weight: Tensor) -> Tensor:
    return weight.flatten().view(torch.uint8)


def packed(weights: dict[str, Tensor], buffer_bytes: int) -> list[Tensor]:
    """A chunk ends with the tensor that makes it larger than the buffer."""
    chunks: list[list[Tensor]] = [[]]
    for weight in weights.values():
        if sum(map(len, chunks[-1])) > buffer_bytes:
            chunks.append([])
        chunks[-1].append(as_bytes(weight))
    return [torch.cat(chunk) for chunk in chunks]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("buffering", WeightBuffering)
def test_tensors_are_cut_out_of_broadcasts(buffering: WeightBuffering, seed: int) -> None:
    weights = random_weights(seed)
    broadcasts = {
        WeightBuffering.EACH: list(weights.values()),
        WeightBuffering.BUCKET: [torch.cat([as_bytes(weight) for weight in weights.values()])],
        WeightBuffering.PACKED: packed(weights, 100),
    }[buffering]
    left = list(broadcasts)

    def receive(into: Tensor) -> None:
        sent = left.pop(0)
        assert (into.shape, into.dtype) == (sent.shape, sent.dtype)
        into.copy_(sent)

    parts = list(received(announced(weights), buffering, 100, receive, CPU))

    assert not left
    found = {entry.name: entry.tensor for entries in parts for entry in entries}
    assert list(found) == list(weights)
    for name, weight in weights.items():
        assert (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape)
        assert torch.equal(as_bytes(found[name]), as_bytes(weight))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(WeightTensor("w", "float12", (2,)), "float12"), (WeightTensor("w", "int8", (2, -1)), "negative size")],
)
def test_tensors_that_cannot_exist_are_refused(tensor: WeightTensor, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        list(metadata([tensor]))
