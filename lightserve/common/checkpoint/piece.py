"""What a weight expects from the checkpoint: one piece per checkpoint tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # 8-bit floats need a scale, a piece of its own

ANY_SIZE = -1  # in a shape: the checkpoint decides
DUMMY_STD = 0.02  # of random weights, as models are initialised: activations stay finite through any number of layers


def whole(tensor: Tensor) -> Tensor:
    return tensor


class Consumer(Protocol):
    """Converts checkpoint tensors while they are loaded."""

    device: torch.device  # where it wants them

    def receive(self, name: str, tensor: Tensor) -> object:
        """Take one tensor on ``device``, perhaps a view of the file. Several threads call this.

        Returns what must be kept until the device has computed.
        """

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Store random weights instead."""


class StoredSize(NamedTuple):
    """What weights take on this rank."""

    num_bytes: int = 0
    num_weights: int = 0  # that inputs are multiplied with
    num_in_fp8: int = 0  # of these, in fp8


def total_size(sizes: Iterable[StoredSize]) -> StoredSize:
    return StoredSize(*map(sum, zip(*sizes, strict=True))) if (sizes := list(sizes)) else StoredSize()


def size_of_pieces(pieces: Iterable[Piece]) -> StoredSize:
    """Of those that the loader fills directly."""
    stored = [piece.into for piece in pieces if piece.into is not None]
    return StoredSize(sum(into.nbytes for into in stored), sum(into.numel() for into in stored if into.ndim == 2))


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, and where this rank stores its part of it."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint, before it is split over the ranks; sizes may be ANY_SIZE
    into: Tensor | None  # this rank's memory, which the loader fills
    shard_of: Callable[[Tensor], Tensor] = whole  # what of the checkpoint tensor this rank stores
    dtypes: tuple[torch.dtype, ...] = FLOATS  # that the checkpoint tensor may have
    consumer: Consumer | None = (
        None  # of a tensor that is converted; None and no ``into``: this rank stores nothing of it
    )
    other_shapes: tuple[tuple[int, ...], ...] = ()  # that a tensor for a consumer may have instead

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a checkpoint tensor of this shape is the piece."""
        return any(_fits(wanted, shape) for wanted in (self.shape, *self.other_shapes))


def _fits(wanted: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(wanted) == len(shape) and all(
        size in (ANY_SIZE, actual) for size, actual in zip(wanted, shape, strict=True)
    )
