"""Residual, norm and the next matmul as one op: for few rows a launch costs more than its work."""

from __future__ import annotations

from torch import Tensor

from lightserve.common.ops.activation import silu_and_mul
from lightserve.common.ops.linear import linear
from lightserve.common.ops.norm import add_rms_norm
from lightserve.common.ops.registry import op


@op
def add_rms_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``linear`` of ``add_rms_norm``, and the sum, which is the new residual.

    The sum may be in the memory of ``residual`` or elsewhere. Do not read ``residual`` afterwards.
    """
    normed = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias), residual


@op
def add_rms_norm_gate_up(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``silu_and_mul`` of ``add_rms_norm_linear``, and the sum."""
    gate_up, residual = add_rms_norm_linear(x, residual, norm_weight, eps, weight, bias)
    return silu_and_mul(gate_up), residual
