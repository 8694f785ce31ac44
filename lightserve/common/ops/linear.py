from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.registry import op


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``weight`` ``[out, in]``, which may be in bfloat16 beside ``x`` in float32.

    Then a device that multiplies numbers in bfloat16 may round ``x`` to it. The sums stay in float32.
    """
    return F.linear(x, weight.to(x.dtype), bias)


@op
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in float32, for results that must not be rounded: the scores of a router."""
    return F.linear(x.float(), weight.float())


@op
def bmm(x: Tensor, y: Tensor) -> Tensor:
    """``[batch, rows, depth]`` times ``[batch, depth, columns]``, summed in float32; kernels take any strides."""
    return torch.bmm(x.float(), y.float()).to(x.dtype)
