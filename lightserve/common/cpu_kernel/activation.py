"""Activations by torch's own CPU kernels. The definitions, which are slower, are batch-invariant."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightserve.common import ops


@ops.silu_and_mul.impl("cpu")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@ops.gelu_tanh.impl("cpu")
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@ops.gelu.impl("cpu")
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


BACKEND = ops.batch_invariant("cpu")
ops.silu_and_mul.impl(BACKEND)(ops.silu_and_mul.impls[ops.REFERENCE])
ops.gelu_tanh.impl(BACKEND)(ops.gelu_tanh.impls[ops.REFERENCE])
ops.gelu.impl(BACKEND)(ops.gelu.impls[ops.REFERENCE])
