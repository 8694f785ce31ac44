"""Kernels of Liger-Kernel as the backend liger."""

from __future__ import annotations

from liger_kernel.ops.relu_squared import relu_squared_forward
from liger_kernel.ops.rms_norm import rms_norm_forward
from liger_kernel.ops.swiglu import swiglu_forward
from torch import Tensor

from lightserve.common import ops


@ops.relu2.impl("liger")
def relu2(x: Tensor) -> Tensor:
    out: Tensor = relu_squared_forward(x)
    return out


@ops.rms_norm.impl("liger")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]
    return out


@ops.silu_and_mul.impl("liger")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = (half.contiguous() for half in gate_up.chunk(2, -1))
    out: Tensor = swiglu_forward(gate, up)[-1]
    return out
