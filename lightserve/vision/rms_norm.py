from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightserve.common import ops


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place, then its norm."""
        return ops.add_rms_norm(x, residual, self.weight, self._eps)


def rms_normed(x: Tensor, eps: float) -> Tensor:
    """By a norm without weights."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
