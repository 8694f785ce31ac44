"""Softmax along any dimension: one program for some rows, which it reads once if they fit in registers, else twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2

MAX_BLOCK = 8192  # numbers of a row that a program holds: 16 in each lane of 16 warps
TILE = 2048  # numbers of a program with several short rows
MAX_ROWS = 32
ELEMENTS_PER_WARP = 512
MAX_WARPS = 16


@triton.jit
def _load_tile(row_ptrs, cols, length, stride, is_row):
    mask = is_row[:, None] & (cols < length)[None, :]
    return tl.load(row_ptrs[:, None] + (cols * stride)[None, :], mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _add_powers(x, peak, total):
    """The largest number of each row so far, the same but finite if all are -inf, and the sum of powers of e below it.

    The difference of -inf and itself would be NaN.
    """
    new_peak = tl.maximum(peak, tl.max(x, axis=1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, shift, total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)


@triton.jit
def _normalize(x, shift, total, IS_LOG: tl.constexpr):
    if IS_LOG:
        return x - shift[:, None] - tl.log(total)[:, None]
    return tl.exp(x - shift[:, None]) / total[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _softmax_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    length,
    inner_size,
    outer_stride,
    stride,
    inner_stride,
    IS_LOG: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    outer, inner = rows // inner_size, rows % inner_size
    row_ptrs = x_ptr + outer * outer_stride + inner * inner_stride
    out_ptrs = out_ptr + outer * length * inner_size + inner
    cols = tl.arange(0, BLOCK).to(tl.int64)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    if IS_WHOLE:
        x = _load_tile(row_ptrs, cols, length, stride, is_row)
        peak, shift, total = _add_powers(x, peak, total)
        mask = is_row[:, None] & (cols < length)[None, :]
        tl.store(out_ptrs[:, None] + (cols * inner_size)[None, :], _normalize(x, shift, total, IS_LOG), mask=mask)
    else:
        shift = total
        for start in range(0, length, BLOCK):
            x = _load_tile(row_ptrs, cols + start, length, stride, is_row)
            peak, shift, total = _add_powers(x, peak, total)
        for start in range(0, length, BLOCK):
            x = _load_tile(row_ptrs, cols + start, length, stride, is_row)
            out = _normalize(x, shift, total, IS_LOG)
            mask = is_row[:, None] & (cols + start < length)[None, :]
            tl.store(out_ptrs[:, None] + ((cols + start) * inner_size)[None, :], out, mask=mask)


def _launch(x: Tensor, dim: int, out_dtype: torch.dtype | None, *, is_log: bool) -> Tensor:
    out = torch.empty_like(x, dtype=out_dtype or x.dtype, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    dim %= x.dim()
    outer_size, length = x.shape[:dim].numel(), x.shape[dim]
    view = x.reshape(outer_size, length, -1)  # a copy only if no three strides describe it
    num_rows, block = outer_size * view.shape[2], min(next_power_of_2(length), MAX_BLOCK)
    rows = max(min(TILE // block, MAX_ROWS, next_power_of_2(num_rows)), 1)
    _softmax_kernel[(cdiv(num_rows, rows),)](
        view,
        out,
        num_rows,
        length,
        view.shape[2],
        *view.stride(),
        IS_LOG=is_log,
        IS_WHOLE=length <= block,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(max(rows * block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    )
    return out


@ops.softmax.impl("triton")
def softmax(x: Tensor, dim: int, out_dtype: torch.dtype | None = None) -> Tensor:
    return _launch(x, dim, out_dtype, is_log=False)


@ops.log_softmax.impl("triton")
def log_softmax(x: Tensor, dim: int, out_dtype: torch.dtype | None = None) -> Tensor:
    return _launch(x, dim, out_dtype, is_log=True)
