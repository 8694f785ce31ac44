from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.activation import silu_and_mul
from lightserve.common.ops.registry import op


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``weight`` ``[out, in]``."""
    return F.linear(x, weight, bias)


@op
def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu_and_mul(linear(x, weight, bias))``, which a backend may compute at once, with the same roundings."""
    return silu_and_mul(linear(x, weight, bias))
