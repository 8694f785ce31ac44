"""Rounding of activations to 8 bits, alone or behind a norm or a gated SiLU: one program for each row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import QuantizedRows, RowQuant
from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous, rows_in_place
from lightserve.common.triton_kernel.linear._quantize_row import check_groups, new_rows, store_codes
from lightserve.common.triton_kernel.norm._norm import load_row
from lightserve.common.triton_kernel.norm.activation import activate

# us on an H200 for 2,048 rows of 14,336 behind a gated SiLU: with up to 32 warps 44, with up to 16 49. With a row both
# take 4.1. With 256 elements per warp, 2,048 rows of 4,096 take 8.9 instead of 7.8.
ELEMENTS_PER_WARP, MAX_WARPS = 512, 32


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    scale_ptr,
    x_row_stride,
    scales_row_stride,
    scales_group_stride,
    n_cols,
    IS_GATED: tl.constexpr,
    MAX_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x_ptrs = x_ptr + row * x_row_stride + cols
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        x = activate(x, "silu") * tl.load(x_ptrs + n_cols, mask=mask, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # as if it had been stored
    store_codes(
        x,
        row,
        codes_ptr,
        scales_ptr,
        scale_ptr,
        scales_row_stride,
        scales_group_stride,
        n_cols,
        MAX_CODE,
        GROUP,
        BLOCK,
    )


@triton.jit
def _rms_norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    codes_ptr,
    scales_ptr,
    scale_ptr,
    x_row_stride,
    residual_row_stride,
    scales_row_stride,
    scales_group_stride,
    n_cols,
    eps,
    MAX_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x = load_row(x_ptr, residual_ptr, row, x_row_stride, residual_row_stride, cols, mask)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    normed = (x * rstd * weight).to(residual_ptr.dtype.element_ty).to(tl.float32)  # as if it had been stored
    store_codes(
        normed,
        row,
        codes_ptr,
        scales_ptr,
        scale_ptr,
        scales_row_stride,
        scales_group_stride,
        n_cols,
        MAX_CODE,
        GROUP,
        BLOCK,
    )


def _constants(op: str, width: int, quant: RowQuant) -> dict[str, Any]:
    block = max(next_power_of_2(width), quant.group_size or 1)
    return {
        "MAX_CODE": quant.max_code,
        "GROUP": check_groups(op, width, quant),
        "BLOCK": block,
        "num_warps": min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    }


def _quantize(op: str, x: Tensor, quant: RowQuant, *, is_gated: bool) -> QuantizedRows:
    if is_gated and x.shape[1] % 2:
        raise ValueError(f"{op}: the last dimension holds gate and up, and {x.shape[1]} is odd")
    check_last_contiguous(op, x=x)
    width = x.shape[1] // (2 if is_gated else 1)
    out = new_rows(len(x), width, quant, x.device)
    if out.codes.numel():
        _quantize_rows_kernel[(len(x),)](
            x,
            out.codes,
            out.scales,
            quant.scale,
            x.stride(0),
            out.scales.stride(0),
            out.scales.stride(1),
            width,
            IS_GATED=is_gated,
            **_constants(op, width, quant),
        )
    return out


@ops.quantize_rows.impl("triton")
def quantize_rows(x: Tensor, quant: RowQuant) -> QuantizedRows:
    return _quantize("quantize_rows", x, quant, is_gated=False)


@ops.silu_and_mul_quantize.impl("triton")
def silu_and_mul_quantize(gate_up: Tensor, quant: RowQuant) -> QuantizedRows:
    return _quantize("silu_and_mul_quantize", gate_up, quant, is_gated=True)


@ops.add_rms_norm_quantize.impl("triton")
def add_rms_norm_quantize(x: Tensor, residual: Tensor, weight: Tensor, eps: float, quant: RowQuant) -> QuantizedRows:
    op, width = "add_rms_norm_quantize", x.shape[1]
    check_last_contiguous(op, x=x, residual=residual)
    residual = rows_in_place(op, "residual", residual)
    out = new_rows(len(x), width, quant, x.device)
    if out.codes.numel():
        _rms_norm_quantize_kernel[(len(x),)](
            x,
            residual,
            weight.contiguous(),
            out.codes,
            out.scales,
            quant.scale,
            x.stride(0),
            residual.stride(0),
            out.scales.stride(0),
            out.scales.stride(1),
            width,
            eps,
            **_constants(op, width, quant),
        )
    return out
