"""Kernels of FlagGems as the backend gems. It imports only where a GPU is."""

from __future__ import annotations

import flag_gems
from torch import Tensor

from lightserve.common import ops


@ops.rms_norm.impl("gems")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = flag_gems.rms_norm(x, list(weight.shape), weight, eps)
    return out


@ops.silu_and_mul.impl("gems")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = (half.contiguous() for half in gate_up.chunk(2, -1))
    out: Tensor = flag_gems.silu_and_mul(gate, up)
    return out


@ops.gelu.impl("gems")
def gelu(x: Tensor) -> Tensor:
    out: Tensor = flag_gems.gelu(x)
    return out
