"""RMSNorm: one program for each row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.norm._norm import launch_norm, load_row


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, out_ptr, weight_ptr, x_row_stride, residual_row_stride, n_cols, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols

    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x = load_row(x_ptr, residual_ptr, row, x_row_stride, residual_row_stride, cols, mask)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(out_ptr + row * n_cols + cols, x * rstd * weight, mask=mask)


@ops.rms_norm.impl("triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(_rms_norm_kernel, "rms_norm", x, None, (weight,), eps)


@ops.add_rms_norm.impl("triton")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm(_rms_norm_kernel, "add_rms_norm", x, residual, (weight,), eps)
