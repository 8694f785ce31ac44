"""Matmul with 4-bit weights for several rows: a tile of weights times a tile of inputs, group by group.

Where the inputs are split over several programs, the last one of a tile adds their sums, in order. Inputs in fp8, whose
products with 4-bit numbers are exact too, were slower on an H200: each group then needs scales of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.linear._int4 import scaled_int4, unpack_int4, uses_asm
from lightserve.common.triton_kernel.linear._tiled_int4 import TiledInt4Weight, code_ptrs, rows_of_tile


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int  # rows of the input for each program
    block_n: int  # rows of the weight
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share the inputs


@dataclass(frozen=True, slots=True)
class Tiling:
    """For up to so many rows."""

    num_stages: int
    programs: int  # at least: as many splits as they take
    block_m: int | None = None  # None: as many rows
    block_n: int | None = None  # None: WIDE for wide or deep weights, NARROW for others


# us on an H200 of tiles with groups of 128 and zero points, and of cuBLAS in bfloat16: [28672, 4096] with 1 row 24.5,
# 59.4, with 16 24.2, 59.2, with 32 29.8, 60.5, with 64 42.0, 68.4, with 128 76.8, 70.6; [4096, 14336] 14.6, 32.7 and
# 14.8, 33.3 and 19.0, 34.1 and 25.5, 37.5 and 41.4, 38.7; [6144, 4096] with 16 9.6, 16.7, with 64 14.6, 17.4.
TILINGS = {
    16: Tiling(num_stages=5, programs=224),
    32: Tiling(num_stages=5, programs=224),
    64: Tiling(num_stages=3, programs=224),
    128: Tiling(num_stages=3, programs=192, block_n=64),
    256: Tiling(num_stages=3, programs=96, block_m=128, block_n=128),
}
MAX_ROWS = max(TILINGS)
WIDE, NARROW = 128, 64
WIDE_OUT, DEEP_IN = 16384, 8192
WARP_ROWS = 16  # of the weight: a warp multiplies so many at once
MIN_GROUPS = 4  # of a split
FLOAT32 = Config(block_m=32, block_n=32, num_warps=4, num_stages=2)  # larger tiles compile slowly
# For any number of rows, so that a result does not depend on the other rows of the batch.
INVARIANT = Config(block_m=64, block_n=128, num_warps=8, num_stages=3)


@triton.jit(do_not_specialize=["rows", "num_groups", "split_groups"])
def _int4_tiles_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    done_counts_ptr,
    rows,
    out_size,
    num_groups,
    split_groups,
    x_row_stride,
    codes_row_stride,
    scales_row_stride,
    scales_group_stride,
    USE_ASM: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    ARE_ZEROS: tl.constexpr,
    IS_TILED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``sums`` ``[tiles, splits, BLOCK_N, BLOCK_M]``. ``ARE_ZEROS``: the offsets are zero points."""
    in_rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = tl.program_id(1) * BLOCK_N
    out_cols = (first_col + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_row = in_rows < rows
    is_col = out_cols < out_size
    x_ptrs = x_ptr + in_rows[:, None] * x_row_stride + tl.arange(0, HALF)[None, :]
    codes_ptrs, is_code = code_ptrs(codes_ptr, first_col, out_size, codes_row_stride, BLOCK_N, HALF, IS_TILED)
    scale_places = out_cols * scales_row_stride

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first_group = tl.program_id(2) * split_groups
    for group in tl.range(first_group, tl.minimum(first_group + split_groups, num_groups), num_stages=STAGES):
        codes = tl.load(codes_ptrs + group * codes_ptrs.shape[1], mask=is_code, other=0)
        x_low = tl.load(x_ptrs + group * (2 * HALF), mask=is_row[:, None], other=0.0)
        x_high = tl.load(x_ptrs + group * (2 * HALF) + HALF, mask=is_row[:, None], other=0.0)
        scales = tl.load(scales_ptr + scale_places + group * scales_group_stride, mask=is_col, other=0.0)
        offsets = None
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + scale_places + group * scales_group_stride, mask=is_col, other=0.0)
        if IS_TILED:
            codes = rows_of_tile(codes, BLOCK_N, HALF)
        acc += _product(codes, (x_low.T, x_high.T), scales, offsets, HAS_ZERO_POINTS, ARE_ZEROS, USE_ASM)

    out_ptrs = out_ptr + in_rows[None, :] * out_size + out_cols[:, None]
    mask = is_row[None, :] & is_col[:, None]
    if IS_SPLIT:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last, acc = _add_splits(acc, sums_ptr, done_counts_ptr + tile, tile)
        mask = mask & is_last
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptrs, acc, mask=mask)


@triton.jit
def _product(codes, x, scales, offsets, HAS_ZERO_POINTS: tl.constexpr, ARE_ZEROS: tl.constexpr, USE_ASM: tl.constexpr):
    """Of codes ``[N, K / 2]`` with ``x``, two tiles ``[K / 2, M]`` for the low and the high numbers.

    Zero points are subtracted while codes are unpacked, and scales are applied to the product. Other offsets are added
    to each weight, after its scale. The product has sums of its own: multiply instructions run at once only where no
    other instruction has written their sums (ptxas, C7515).
    """
    x_low, x_high = x
    if offsets is None or HAS_ZERO_POINTS:
        if offsets is None:
            zeros = tl.full(scales.shape, 8.0, tl.float32)
        elif ARE_ZEROS:
            zeros = offsets
        else:
            zeros = 8.0 - tl.where(scales != 0.0, offsets / scales, 0.0)
        low, high = unpack_int4(codes, zeros[:, None], x_low.dtype, USE_ASM)
        product = tl.dot(low, x_low, input_precision="ieee")
        product = tl.dot(high, x_high, acc=product, input_precision="ieee") * scales[:, None]
    else:
        low, high = scaled_int4(codes, scales[:, None], offsets[:, None], x_low.dtype, USE_ASM)
        product = tl.dot(low, x_low, input_precision="ieee")
        product = tl.dot(high, x_high, acc=product, input_precision="ieee")
    return product


@triton.jit
def _add_splits(acc, sums_ptr, done_count_ptr, tile):
    """Whether this program is the last one of its tile, and then the sum of all of them."""
    splits, split = tl.num_programs(2), tl.program_id(2)
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    cells = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    sums_ptrs = sums_ptr + tile.to(tl.int64) * splits * SIZE + cells
    tl.store(sums_ptrs + split * SIZE, acc)
    tl.debug_barrier()  # all threads have stored before the program is counted as done
    is_last = tl.atomic_add(done_count_ptr, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.store(done_count_ptr, 0)  # for the next product
        acc = tl.load(sums_ptrs, cache_modifier=".cg")
        for later_split in range(1, splits):
            acc += tl.load(sums_ptrs + later_split * SIZE, cache_modifier=".cg")
    return is_last, acc


def config_of(x: Tensor, weight: ops.Int4Weight) -> Config:
    """Of up to MAX_ROWS rows."""
    if x.dtype == torch.float32:
        return FLOAT32
    rows, tiling = next((rows, tiling) for rows, tiling in TILINGS.items() if len(x) <= rows)
    out_size, in_size = weight.shape
    is_wide = out_size > WIDE_OUT or in_size >= DEEP_IN
    block_m, block_n = tiling.block_m or rows, tiling.block_n or (WIDE if is_wide else NARROW)
    splits = next_power_of_2(cdiv(tiling.programs, cdiv(out_size, block_n)))
    return Config(
        block_m=block_m,
        block_n=block_n,
        num_warps=8 if block_m * block_n > 128 * 64 else 4,
        num_stages=tiling.num_stages,
        splits=max(min(splits, weight.scales.shape[-1] // MIN_GROUPS), 1),
    )


def invariant_config(dtype: torch.dtype) -> Config:
    return FLOAT32 if dtype == torch.float32 else INVARIANT


def multiply(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[rows, in]``; groups are of at least 32."""
    rows, out_size = len(x), weight.shape[-2]
    half, num_groups = weight.group_size // 2, weight.scales.shape[-1]
    split_groups = cdiv(num_groups, config.splits)
    grid = (cdiv(rows, config.block_m), cdiv(out_size, config.block_n), cdiv(num_groups, split_groups))
    sums = done_counts = None
    if grid[2] > 1:
        sums = x.new_empty((*grid, config.block_n, config.block_m), dtype=torch.float32)
        done_counts = _done_counts(weight, grid[0] * grid[1])
    zeros = weight.zeros if isinstance(weight, TiledInt4Weight) else None
    tile_bytes = half * (config.block_n + 2 * config.block_m * x.element_size())
    out = x.new_empty(rows, out_size)
    _int4_tiles_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.offsets if zeros is None else zeros,
        bias,
        out,
        sums,
        done_counts,
        rows,
        out_size,
        num_groups,
        split_groups,
        x.stride(0),
        weight.codes.stride(0),
        *weight.scales.stride(),
        USE_ASM=uses_asm(x.dtype),
        HAS_ZERO_POINTS=weight.has_zero_points,
        ARE_ZEROS=zeros is not None,
        IS_TILED=isinstance(weight, TiledInt4Weight),
        IS_SPLIT=grid[2] > 1,
        HALF=half,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=stages_that_fit(tile_bytes, config.num_stages),
        num_warps=config.num_warps,
    )
    return out


def _done_counts(weight: ops.Int4Weight, tiles: int) -> Tensor:
    """How many splits of each tile are done: 0 between launches. A weight in tiles has its own, already cleared."""
    if isinstance(weight, TiledInt4Weight) and tiles <= len(weight.done_counts):
        return weight.done_counts
    return weight.codes.new_zeros(tiles, dtype=torch.int32)
