"""What a weight expects from the checkpoint: one piece per checkpoint tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # 8-bit floats need a scale, a piece of its own


def _whole(tensor: Tensor) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, and where this rank stores its part of it."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint, before it is split over the ranks
    into: Tensor | None  # this rank's memory, which the loader fills
    part: Callable[[Tensor], Tensor] = _whole  # what of the checkpoint tensor this rank stores
    dtypes: tuple[torch.dtype, ...] = FLOATS  # that the checkpoint tensor may have
    consumer: Consumer | None = (
        None  # of a tensor that is converted; None and no ``into``: this rank stores nothing of it
    )
