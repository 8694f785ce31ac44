"""Matmul with 4-bit weights.

Up to MAX_ROWS rows, the kernel here reads the weight once. It is limited by the number of instructions per weight, so a
program loads several groups of each row as one tile ``[groups, rows, bytes]`` with one set of addresses, and multiplies
them by a batched ``tl.dot``. Zero points are subtracted while codes are unpacked, which costs nothing, and scales are
applied to the product of each group. Offsets that are no zero points are added to each weight, after its scale. For
narrow weights the inputs are split over several programs, whose sums a second kernel adds in order.
More rows, and all of weights in tiles, are the work of ``_int4_tiles``; of many rows the weight is dequantised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.linear import _int4_tiles
from lightserve.common.triton_kernel.linear._int4 import scaled_int4, unpack_int4, uses_asm
from lightserve.common.triton_kernel.linear._split_sums import add_sums, new_sums
from lightserve.common.triton_kernel.linear._tiled_int4 import TiledInt4Weight
from lightserve.common.triton_kernel.linear.dequantize import linear_dequantized

MIN_ROWS = 8  # of the input in one multiply instruction
MIN_HALF = 16  # bytes of a group: the shortest sum that tl.dot takes
MAX_ROWS = 16
MAX_USUAL_ROWS = 128  # of weights that are not in tiles, without dequantising


@dataclass(frozen=True, slots=True)
class Config:
    block_n: int  # rows of the weight for each program
    groups: int  # of each of these rows in a tile
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share the inputs


# us on an H200 with groups of 128 and zero points, and of cuBLAS in bfloat16: [28672, 4096] with 1 row 25.6, 57.7, with
# 16 36.6, 60.3; [4096, 14336] with 1 row 15.2, 31.7, with 16 19.9 (22.6 without splits), 33.9; [6144, 4096] with 1 row
# 8.6, 16.8, with 16 12.1, 16.8.
WIDE = Config(block_n=32, groups=4, num_warps=4, num_stages=3)
NARROW = Config(block_n=16, groups=8, num_warps=4, num_stages=3)  # up to 8 rows
DEEP = Config(block_n=32, groups=4, num_warps=4, num_stages=3, splits=2)  # more rows
NARROW_OUT, DEEP_IN = 16384, 8192  # up to, from
FLOAT32 = Config(block_n=16, groups=1, num_warps=4, num_stages=2)  # without tensor cores, larger tiles compile slowly


@triton.jit(do_not_specialize=["rows"])
def _linear_int4_kernel(
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
    HAS_ZERO_POINTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``out`` ``[splits, rows, out]``; ``split_groups``: a multiple of GROUPS."""
    in_rows = tl.arange(0, BLOCK_M)
    out_cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * split_groups
    is_row = (in_rows < rows)[None, :, None]
    is_col = out_cols < out_size
    groups = tl.arange(0, GROUPS)
    places = tl.arange(0, HALF)[None, None, :]
    x_ptrs = x_ptr + in_rows.to(tl.int64)[None, :, None] * x_row_stride + groups[:, None, None] * (2 * HALF) + places
    codes_ptrs = codes_ptr + out_cols.to(tl.int64)[None, :, None] * codes_row_stride
    codes_ptrs += groups[:, None, None] * HALF + places
    scale_places = out_cols.to(tl.int64)[None, :] * scales_row_stride + groups[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    acc = tl.zeros([GROUPS, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(first, tl.minimum(first + split_groups, num_groups), GROUPS, num_stages=STAGES):
        is_group = groups < (GROUPS if IS_EVEN else num_groups - start)
        is_weight = is_group[:, None] & is_col[None, :]
        codes = tl.load(codes_ptrs + start * HALF, mask=is_weight[:, :, None], other=0)
        x_low = tl.load(x_ptrs + start * (2 * HALF), mask=is_row & is_group[:, None, None], other=0.0)
        x_high = tl.load(x_ptrs + start * (2 * HALF) + HALF, mask=is_row & is_group[:, None, None], other=0.0)
        scales = tl.load(scales_ptr + scale_places + start, mask=is_weight, other=0.0)
        x_low, x_high = x_low.permute(0, 2, 1), x_high.permute(0, 2, 1)
        if offsets_ptr is None:
            zeros = tl.full([GROUPS, BLOCK_N], 8.0, tl.float32)
        else:
            offsets = tl.load(offsets_ptr + scale_places + start, mask=is_weight, other=0.0)
            zeros = 8.0 - tl.where(scales != 0.0, offsets / scales, 0.0)
        if offsets_ptr is None or HAS_ZERO_POINTS:
            low, high = unpack_int4(codes, zeros[:, :, None], dtype, USE_ASM)
            product = tl.dot(low, x_low, input_precision="ieee")
            product = tl.dot(high, x_high, acc=product, input_precision="ieee")
            acc += product * scales[:, :, None]
        else:
            low, high = scaled_int4(codes, scales[:, :, None], offsets[:, :, None], dtype, USE_ASM)
            acc = tl.dot(low, x_low, acc=acc, input_precision="ieee")
            acc = tl.dot(high, x_high, acc=acc, input_precision="ieee")
    total = tl.sum(acc, axis=0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    out_rows = (tl.program_id(1) * rows + in_rows).to(tl.int64)[None, :]
    tl.store(out_ptr + out_rows * out_size + out_cols[:, None], total, mask=(in_rows < rows)[None, :] & is_col[:, None])


def config_of(x: Tensor, weight: ops.Int4Weight) -> Config:
    out_size, in_size = weight.shape
    if x.dtype == torch.float32:
        return FLOAT32
    if out_size > NARROW_OUT:
        return WIDE
    if len(x) <= MIN_ROWS:
        return NARROW
    return DEEP if in_size >= DEEP_IN else WIDE


def multiply(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` of up to MAX_ROWS rows, by the kernel. Groups are of at least 32."""
    rows, out_size = len(x), weight.shape[-2]
    half, num_groups = weight.group_size // 2, weight.scales.shape[-1]
    block_m = max(next_power_of_2(rows), MIN_ROWS)
    groups = min(config.groups, next_power_of_2(num_groups))
    split_groups = cdiv(num_groups, groups * config.splits) * groups
    splits = cdiv(num_groups, split_groups)
    tile_bytes = groups * half * (config.block_n + 2 * block_m * x.element_size())
    out = new_sums(x, rows, out_size, splits)
    _linear_int4_kernel[(cdiv(out_size, config.block_n), splits)](
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
        HAS_ZERO_POINTS=weight.has_zero_points,
        IS_EVEN=num_groups % groups == 0,
        HALF=half,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        GROUPS=groups,
        STAGES=stages_that_fit(tile_bytes, config.num_stages),
        num_warps=config.num_warps,
    )
    return add_sums(out, bias, x.dtype)


@ops.linear_int4.impl("triton")
def linear_int4(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None = None) -> Tensor:
    check_last_contiguous("linear_int4", x=x, codes=weight.codes)
    rows = x.reshape(-1, x.shape[-1])
    most_rows = _int4_tiles.MAX_ROWS if isinstance(weight, TiledInt4Weight) else MAX_USUAL_ROWS
    if not 0 < len(rows) <= most_rows or weight.group_size // 2 < MIN_HALF:
        return linear_dequantized(x, weight, bias)
    return _few_rows(rows, weight, bias).view(*x.shape[:-1], weight.shape[-2])


def _few_rows(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None) -> Tensor:
    if len(x) <= MAX_ROWS and not isinstance(weight, TiledInt4Weight):
        return multiply(x, weight, bias, config_of(x, weight))
    return _int4_tiles.multiply(x, weight, bias, _int4_tiles.config_of(x, weight))
