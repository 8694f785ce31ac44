"""Inputs of ops, which make a wrong read show."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def strided(x: Tensor, poison: float = NAN) -> Tensor:
    """The same values as the middle columns of a wider tensor of poison."""
    wider = x.new_full((*x.shape[:-1], x.shape[-1] + 7), poison)
    view = wider[..., 3:-4]
    view.copy_(x)
    return view


def wide(x: Tensor) -> Tensor:
    """A float32 copy, for the oracle."""
    return x.to(torch.float32, copy=True)


def ints(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)
