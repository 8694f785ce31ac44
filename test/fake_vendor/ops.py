"""The operators of the device. All others are computed by their definitions."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common import ops
from test.fake_vendor.events import record

BACKEND = "fake"


@ops.allocates_for(BACKEND)
def empty_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Columns side by side: the hardware reads them so."""
    return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=device).transpose(-1, -2)


@ops.linear.impl(BACKEND)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.stride(0) == 1 and weight.stride(1) > 1:
        record("product with a weight in the layout of the device")
    out = x @ weight.T
    return out if bias is None else out + bias
