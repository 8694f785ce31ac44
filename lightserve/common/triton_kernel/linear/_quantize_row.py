"""Rounds a row that a program holds to 8 bits. Kernels that produce rows end with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.ops import QuantizedRows, RowQuant

# Triton's interpreter casts to fp8 wrongly where rounding reaches the next power of two: it gets rounded numbers.
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
ROUNDING = tl.constexpr(1.5 * 2.0**23)  # added and subtracted: float32 has no fraction bits there


@triton.jit
def _round_to_e4m3(x):
    """Numbers of at most 448 as e4m3 has them, in float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits & ~0xFFFFF).to(tl.float32, bitcast=True)
    subnormal = (x + ROUNDING / 512) - ROUNDING / 512
    return tl.where(tl.abs(x) < 0.015625, subnormal, normal)


@triton.jit
def store_codes(
    x,
    row,
    codes_ptr,
    scales_ptr,
    scale_ptr,
    scales_row_stride,
    scales_group_stride,
    n_cols,
    MAX_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``x`` float32 ``[BLOCK]``, zero behind ``n_cols``. ``GROUP`` 0: one scale for the row."""
    if GROUP == 0:
        if scale_ptr is None:
            scale = tl.maximum(tl.max(tl.abs(x), axis=0) / MAX_CODE, TINY)
            tl.store(scales_ptr + row * scales_row_stride, scale)
        else:
            scale = tl.load(scale_ptr)
        scaled = x / scale
    else:
        grouped = tl.reshape(x, (BLOCK // GROUP, GROUP))
        scales = tl.maximum(tl.max(tl.abs(grouped), axis=1) / MAX_CODE, TINY)
        groups = tl.arange(0, BLOCK // GROUP)
        scale_ptrs = scales_ptr + row * scales_row_stride + groups * scales_group_stride
        tl.store(scale_ptrs, scales, mask=groups < n_cols // GROUP)
        scaled = tl.reshape(grouped / scales[:, None], (BLOCK,))
    scaled = tl.minimum(tl.maximum(scaled, -MAX_CODE), MAX_CODE)
    if codes_ptr.dtype.element_ty == tl.int8:
        scaled = (scaled + ROUNDING) - ROUNDING
    elif IS_INTERPRETED:
        scaled = _round_to_e4m3(scaled)
    cols = tl.arange(0, BLOCK)
    tl.store(codes_ptr + row * n_cols + cols, scaled.to(codes_ptr.dtype.element_ty), mask=cols < n_cols)


def check_groups(op: str, width: int, quant: RowQuant) -> int:
    """``GROUP`` of the kernels."""
    group = quant.group_size or 0
    if group and (width % group or group & (group - 1)):
        raise ValueError(f"{op}: groups of {group} numbers; wanted a power of two that divides {width}")
    return group


def new_rows(rows: int, width: int, quant: RowQuant, device: torch.device) -> QuantizedRows:
    """Memory for the result. Scales of groups have the rows side by side, as torch's product wants them."""
    codes = torch.empty((rows, width), dtype=quant.dtype, device=device)
    if quant.scale is not None:
        groups = width // quant.group_size if quant.group_size else 1
        return QuantizedRows(codes, quant.scale.expand(rows, groups))
    groups = width // quant.group_size if quant.group_size else 1
    scales: Tensor = torch.empty((groups, rows), dtype=torch.float32, device=device).t()
    return QuantizedRows(codes, scales)
