"""What a weight expects from the checkpoint: one piece per checkpoint tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # 8-bit floats need a scale, a piece of its own


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, and where this rank stores its part of it."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint, before it is split over the ranks
    into: Tensor | None  # this rank's memory, which the loader fills; None: the rank stores nothing of it
    part: Callable[[Tensor], Tensor] = _whole  # from the checkpoint tensor to what goes into ``into``
    dtypes: tuple[torch.dtype, ...] = FLOATS  # that the checkpoint tensor may have
