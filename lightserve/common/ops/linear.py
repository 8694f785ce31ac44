from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightserve.common.ops.registry import op


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``weight`` ``[out, in]``."""
    return F.linear(x, weight, bias)
