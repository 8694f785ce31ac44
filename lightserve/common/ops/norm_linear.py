"""A residual, its norm, and what multiplies it next, as one op: for few rows, kernels cost more than their work."""

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
    """``linear`` of ``add_rms_norm``, and the sum, which is the residual from now on.

    The sum may be in the memory of ``residual`` or elsewhere, so ``residual`` is not to be read afterwards.
    """
    normed = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias), residual


@op
def add_rms_norm_gate_up(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``silu_and_mul`` of ``add_rms_norm_linear``, and the sum, as there."""
    gate_up, residual = add_rms_norm_linear(x, residual, norm_weight, eps, weight, bias)
    return silu_and_mul(gate_up), residual
