"""Product of rows and a weight that are both in fp8 or both in int8, for few rows, where reading the weight takes long.

The weight is the left operand, as in ``linear.py``. fp8 sums are added in float32 after every tile: the GPU's own sums
over fp8 keep 14 bits. ``tl.range`` pipelines the loads of scales too; a plain loop pipelines only what feeds a dot, and
waits for each scale (3.55 instead of 3.80 TB/s of a weight [28672, 4096] with a row on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.ops import Fp8Weight, Int8Weight, QuantizedRows
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import stages_that_fit

MIN_BLOCK_M = 8  # rows in one multiply instruction
MIN_BLOCK_K = 32  # the shortest sum of 8-bit numbers that tl.dot takes
MAX_BLOCK_M = 128


@dataclass(frozen=True, slots=True)
class Config:
    block_n: int  # rows of the weight for each program
    block_k: int  # inputs of a tile, if scales do not decide
    num_warps: int
    num_stages: int


# us on an H200 for [28672, 4096] in fp8: FEW with 1 and 8 rows 30.4, 30.8; WIDE with 16 and 64 rows 31.2, 33.8. With
# 64 rows of the weight and 4 warps the GPU multiplies tiles of 64 rows at once; with 16 there are enough programs for
# narrow weights.
NARROW = Config(block_n=16, block_k=512, num_warps=1, num_stages=4)
FEW = Config(block_n=32, block_k=256, num_warps=2, num_stages=3)
WIDE = Config(block_n=64, block_k=128, num_warps=4, num_stages=3)
NARROW_ROWS, NARROW_OUT, FEW_ROWS = 16, 8192, 8
INVARIANT = Config(block_n=64, block_k=128, num_warps=4, num_stages=4)
INVARIANT_BLOCK_M = 64


@triton.jit(do_not_specialize=["rows"])
def _eight_bit_linear_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_size,
    in_size,
    x_row_stride,
    x_scales_row_stride,
    x_scales_group_stride,
    weight_row_stride,
    weight_scales_row_stride,
    ROWS_PER_SCALE: tl.constexpr,
    HAS_WEIGHT_GROUPS: tl.constexpr,
    HAS_X_GROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    out_rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    out_cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = out_rows < rows
    is_col = out_cols < out_size
    cols = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + out_rows[:, None] * x_row_stride + cols
    weight_ptrs = weight_ptr + out_cols.to(tl.int64)[:, None] * weight_row_stride + cols
    x_scale_ptrs = x_scales_ptr + out_rows * x_scales_row_stride
    weight_scale_ptrs = weight_scales_ptr + (out_cols // ROWS_PER_SCALE).to(tl.int64) * weight_scales_row_stride
    IS_INT: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    HAS_GROUPS: tl.constexpr = HAS_WEIGHT_GROUPS or HAS_X_GROUPS
    SUM: tl.constexpr = tl.int32 if IS_INT and not HAS_GROUPS else tl.float32
    DOT: tl.constexpr = tl.int32 if IS_INT else tl.float32

    acc = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    for tile in tl.range(0, tl.cdiv(in_size, BLOCK_K), num_stages=NUM_STAGES):
        start = tile * BLOCK_K
        is_in = cols < (BLOCK_K if IS_EVEN else in_size - start)
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_in, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=is_col[:, None] & is_in, other=0.0)
        product = tl.dot(weight, x.T, out_dtype=DOT).to(SUM)
        if HAS_WEIGHT_GROUPS:
            product *= tl.load(weight_scale_ptrs + tile, mask=is_col, other=0.0)[:, None]
        if HAS_X_GROUPS:
            product *= tl.load(x_scale_ptrs + tile * x_scales_group_stride, mask=is_row, other=0.0)[None, :]
        acc += product
    out = acc.to(tl.float32)
    if not HAS_WEIGHT_GROUPS:
        out *= tl.load(weight_scale_ptrs, mask=is_col, other=0.0)[:, None]
    if not HAS_X_GROUPS:
        out *= tl.load(x_scale_ptrs, mask=is_row, other=0.0)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + out_rows[None, :] * out_size + out_cols[:, None], out, mask=is_row[None, :] & is_col[:, None])


def can_multiply(rows: QuantizedRows, weight: Fp8Weight | Int8Weight) -> bool:
    """Whether the kernel has tiles for the groups."""
    group = _group_of(rows, weight)
    return weight.offsets is None and (group == 0 or (group >= MIN_BLOCK_K and group & (group - 1) == 0))


def _group_of(rows: QuantizedRows, weight: Fp8Weight | Int8Weight) -> int:
    """Inputs of a tile, if scales decide; 0: they do not."""
    width = weight.shape[1]
    groups = {len_ for len_ in (weight.scales.shape[1], rows.scales.shape[1]) if len_ > 1}
    if len(groups) > 1:
        return 1  # no tile
    return width // groups.pop() if groups else 0


def config_of(rows: int, out_size: int) -> Config:
    if out_size <= NARROW_OUT and rows <= NARROW_ROWS:
        return NARROW
    return FEW if rows <= FEW_ROWS else WIDE


def multiply(
    rows: QuantizedRows,
    weight: Fp8Weight | Int8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Config | None = None,
    block_m: int | None = None,
) -> Tensor:
    """``block_m``: rows of a program."""
    check_last_contiguous("linear_quantized_rows", codes=rows.codes, weight=weight.codes)
    (num_rows, in_size), out_size = rows.codes.shape, len(weight.codes)
    config = config or config_of(num_rows, out_size)
    block_k = _group_of(rows, weight) or min(config.block_k, max(next_power_of_2(in_size), MIN_BLOCK_K))
    block_m = block_m or min(max(next_power_of_2(max(num_rows, 1)), MIN_BLOCK_M), MAX_BLOCK_M)
    out = torch.empty((num_rows, out_size), dtype=dtype, device=rows.codes.device)
    if not out.numel():
        return out
    _eight_bit_linear_kernel[(cdiv(out_size, config.block_n), cdiv(num_rows, block_m))](
        rows.codes,
        rows.scales,
        weight.codes,
        weight.scales,
        bias,
        out,
        num_rows,
        out_size,
        in_size,
        rows.codes.stride(0),
        rows.scales.stride(0),
        rows.scales.stride(1),
        weight.codes.stride(0),
        weight.scales.stride(0),
        ROWS_PER_SCALE=weight.rows_per_scale if isinstance(weight, Fp8Weight) else 1,
        HAS_WEIGHT_GROUPS=weight.scales.shape[1] > 1,
        HAS_X_GROUPS=rows.scales.shape[1] > 1,
        IS_EVEN=in_size % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        NUM_STAGES=stages_that_fit((config.block_n + block_m) * block_k, config.num_stages),
        num_warps=config.num_warps,
    )
    return out
