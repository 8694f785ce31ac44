"""LayerNorm: one program for each row; the variance is computed from the centred row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.norm._norm import launch_norm, load_row


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    weight_ptr,
    bias_ptr,
    x_row_stride,
    residual_row_stride,
    n_cols,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols

    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x = load_row(x_ptr, residual_ptr, row, x_row_stride, residual_row_stride, cols, mask)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / n_cols, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / n_cols + eps)
    tl.store(out_ptr + row * n_cols + cols, centred * rstd * weight + bias, mask=mask)


@ops.layer_norm.impl("triton")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch_norm(_layer_norm_kernel, "layer_norm", x, None, (weight, bias), eps)


@ops.add_layer_norm.impl("triton")
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return launch_norm(_layer_norm_kernel, "add_layer_norm", x, residual, (weight, bias), eps)
