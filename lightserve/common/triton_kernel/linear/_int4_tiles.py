"""Matmul with 4-bit weights for more rows: a tile of weights times a tile of inputs, group by group.

Weights are scaled in registers, so that all groups are added up by the tensor cores. Inputs in fp8, whose products with
4-bit numbers are exact too, were slower on an H200: 83 instead of 77 us with 64 rows of [28672, 4096], 173 instead of
107 with 128, since each group then needs scales of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.linear._int4 import scaled_int4, uses_asm
from lightserve.common.triton_kernel.linear._split_sums import add_sums, new_sums


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int  # rows of the input for each program
    block_n: int  # rows of the weight
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share the inputs


# us on an H200 with groups of 128, and of cuBLAS in bfloat16: [28672, 4096] with 32 rows 50.7, 61, with 64 77.1, 63.0,
# with 128 107.5, 70; [4096, 14336] 26.8, 34 and 38.3, 37.0 and 55.7 with 4 splits.
WIDE = {
    32: Config(block_m=32, block_n=128, num_warps=8, num_stages=3),
    64: Config(block_m=64, block_n=128, num_warps=8, num_stages=3),
    128: Config(block_m=128, block_n=64, num_warps=4, num_stages=3),
}
NARROW = {
    32: Config(block_m=32, block_n=128, num_warps=8, num_stages=3, splits=4),
    64: Config(block_m=64, block_n=64, num_warps=2, num_stages=3, splits=4),
    128: Config(block_m=128, block_n=128, num_warps=8, num_stages=3, splits=4),
}
NARROW_OUT = 16384
FLOAT32 = Config(block_m=32, block_n=32, num_warps=4, num_stages=2)  # larger tiles compile slowly
# For any number of rows, so that a result does not depend on the other rows of the batch.
INVARIANT = Config(block_m=64, block_n=128, num_warps=8, num_stages=3)


@triton.jit(do_not_specialize=["rows"])
def _int4_tiles_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_size,
    num_groups,
    split_groups,
    x_row_stride,
    codes_row_stride,
    scales_row_stride,
    USE_ASM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``out`` ``[splits, rows, out]``."""
    in_rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    out_cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = in_rows < rows
    is_col = out_cols < out_size
    places = tl.arange(0, HALF)[None, :]
    x_ptrs = x_ptr + in_rows[:, None] * x_row_stride + places
    codes_ptrs = codes_ptr + out_cols.to(tl.int64)[:, None] * codes_row_stride + places
    scale_places = out_cols.to(tl.int64) * scales_row_stride
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first_group = tl.program_id(2) * split_groups
    for group in tl.range(first_group, tl.minimum(first_group + split_groups, num_groups), num_stages=STAGES):
        codes = tl.load(codes_ptrs + group * HALF, mask=is_col[:, None], other=0)
        x_low = tl.load(x_ptrs + group * (2 * HALF), mask=is_row[:, None], other=0.0)
        x_high = tl.load(x_ptrs + group * (2 * HALF) + HALF, mask=is_row[:, None], other=0.0)
        scales = tl.load(scales_ptr + scale_places + group, mask=is_col, other=0.0)
        offsets = tl.zeros([BLOCK_N], tl.float32)
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + scale_places + group, mask=is_col, other=0.0)
        low, high = scaled_int4(codes, scales[:, None], offsets[:, None], dtype, USE_ASM)
        acc = tl.dot(low, x_low.T, acc=acc, input_precision="ieee")
        acc = tl.dot(high, x_high.T, acc=acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    out_rows = tl.program_id(2).to(tl.int64) * rows + in_rows
    tl.store(out_ptr + out_rows[None, :] * out_size + out_cols[:, None], acc, mask=is_row[None, :] & is_col[:, None])


def config_of(x: Tensor, weight: ops.Int4Weight) -> Config:
    """Of up to 128 rows."""
    if x.dtype == torch.float32:
        return FLOAT32
    configs = WIDE if weight.shape[-2] > NARROW_OUT else NARROW
    return next(config for rows, config in configs.items() if len(x) <= rows)


def invariant_config(dtype: torch.dtype) -> Config:
    return FLOAT32 if dtype == torch.float32 else INVARIANT


def multiply(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[rows, in]``; groups are of at least 32."""
    rows, out_size = len(x), weight.shape[-2]
    half, num_groups = weight.group_size // 2, weight.scales.shape[-1]
    split_groups = cdiv(num_groups, config.splits)
    splits = cdiv(num_groups, split_groups)
    out = new_sums(x, rows, out_size, splits)
    tile_bytes = half * (config.block_n + 2 * config.block_m * x.element_size())
    _int4_tiles_kernel[(cdiv(out_size, config.block_n), cdiv(rows, config.block_m), splits)](
        x,
        weight.codes,
        weight.scales,
        weight.offsets,
        bias if splits == 1 else None,
        out,
        rows,
        out_size,
        num_groups,
        split_groups,
        x.stride(0),
        weight.codes.stride(0),
        weight.scales.stride(0),
        USE_ASM=uses_asm(x.dtype),
        HALF=half,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=stages_that_fit(tile_bytes, config.num_stages),
        num_warps=config.num_warps,
    )
    return add_sums(out, bias, x.dtype)
