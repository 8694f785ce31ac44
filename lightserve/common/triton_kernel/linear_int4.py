"""Matmul with 4-bit weights.

Up to MAX_ROWS rows, the kernel here reads the weight once. It is limited by the number of instructions per weight, so a
program loads several groups of each row as one tile ``[groups, rows, bytes]`` with one set of addresses, and multiplies
them by a batched ``tl.dot``. Scales are applied to the product of each group, and offsets to the sum of the group's
input. (A product with ones would need fewer instructions for the sum, but Triton then does not load the input ahead.)
Up to MAX_TILE_ROWS rows, ``_int4_tiles`` computes the product, and above the weight is dequantised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import _int4_tiles
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel._int4 import unpack_int4, uses_asm
from lightserve.common.triton_kernel.dequantize import linear_dequantized

MIN_ROWS = 8  # of the input in one multiply instruction
MIN_HALF = 16  # bytes of a group: the shortest sum that tl.dot takes
# us of a prototype of this kernel on an H200 with groups of 128, and of bfloat16: [28672, 4096] with 1 row 24.0, 58.3,
# with 16 32.1, 60.3, with 32 54, 61; [4096, 4096] with 1 row 6.5, 12.8.
MAX_ROWS = 32
# Not measured with this code. A prototype took 65 us with 64 rows of [28672, 4096] and 112 with 128, bfloat16 66 and
# 70. To dequantise takes about 70 more.
MAX_TILE_ROWS = 128
# Whether inputs are rounded to fp8 between MAX_ROWS and FP8_MAX_ROWS. Not measured yet. It changes the results.
ROUNDS_INPUT = False
FP8_MAX_ROWS = 512


@dataclass(frozen=True, slots=True)
class Config:
    block_n: int  # rows of the weight for each program
    groups: int  # of each of these rows in a tile
    num_warps: int
    num_stages: int


# Not measured with this code: the prototype used 4 to 8 groups, 16 to 32 rows and 1 to 4 warps.
FEW_ROWS = Config(block_n=16, groups=8, num_warps=1, num_stages=3)  # up to 8
MORE_ROWS = Config(block_n=32, groups=4, num_warps=2, num_stages=3)
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
    x_row_stride,
    codes_row_stride,
    scales_row_stride,
    USE_ASM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    in_rows = tl.arange(0, BLOCK_M)
    out_cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (in_rows < rows)[None, :, None]
    is_col = out_cols < out_size
    groups = tl.arange(0, GROUPS)
    places = tl.arange(0, HALF)[None, None, :]
    in_tile = groups[:, None, None] * HALF + places
    x_ptrs = x_ptr + in_rows.to(tl.int64)[None, :, None] * x_row_stride + groups[:, None, None] * (2 * HALF) + places
    codes_ptrs = codes_ptr + out_cols.to(tl.int64)[None, :, None] * codes_row_stride + in_tile
    scale_places = out_cols.to(tl.int64)[None, :] * scales_row_stride + groups[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    acc = tl.zeros([GROUPS, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, num_groups, GROUPS, num_stages=STAGES):
        is_group = groups < (GROUPS if IS_EVEN else num_groups - start)
        is_weight = is_group[:, None] & is_col[None, :]
        codes = tl.load(codes_ptrs + start * HALF, mask=is_weight[:, :, None], other=0)
        x_low = tl.load(x_ptrs + start * (2 * HALF), mask=is_row & is_group[:, None, None], other=0.0)
        x_high = tl.load(x_ptrs + start * (2 * HALF) + HALF, mask=is_row & is_group[:, None, None], other=0.0)
        scales = tl.load(scales_ptr + scale_places + start, mask=is_weight, other=0.0)
        low, high = unpack_int4(codes, dtype, USE_ASM)
        x_low, x_high = x_low.permute(0, 2, 1), x_high.permute(0, 2, 1)
        product = tl.dot(low, x_low, input_precision="ieee")
        product = tl.dot(high, x_high, acc=product, input_precision="ieee")
        acc += product * scales[:, :, None]
        if offsets_ptr is not None:
            offsets = tl.load(offsets_ptr + scale_places + start, mask=is_weight, other=0.0)
            sums = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), axis=1)
            acc += sums[:, None, :] * offsets[:, :, None]
    total = tl.sum(acc, axis=0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + in_rows.to(tl.int64)[None, :] * out_size + out_cols[:, None]
    tl.store(out_ptrs, total, mask=(in_rows < rows)[None, :] & is_col[:, None])


def config_of(x: Tensor) -> Config:
    if x.dtype == torch.float32:
        return FLOAT32
    return FEW_ROWS if len(x) <= MIN_ROWS else MORE_ROWS


def multiply(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` of up to MAX_ROWS rows, by the kernel. Groups are of at least 32."""
    rows, out_size = len(x), weight.shape[-2]
    half, num_groups = weight.group_size // 2, weight.scales.shape[-1]
    block_m = max(next_power_of_2(rows), MIN_ROWS)
    groups = min(config.groups, next_power_of_2(num_groups))
    tile_bytes = groups * half * (config.block_n + 2 * block_m * x.element_size())
    out = x.new_empty((rows, out_size))
    _linear_int4_kernel[(cdiv(out_size, config.block_n),)](
        x,
        weight.codes,
        weight.scales,
        weight.offsets,
        bias,
        out,
        rows,
        out_size,
        num_groups,
        x.stride(0),
        weight.codes.stride(0),
        weight.scales.stride(0),
        USE_ASM=uses_asm(x.dtype),
        IS_EVEN=num_groups % groups == 0,
        HALF=half,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        GROUPS=groups,
        STAGES=stages_that_fit(tile_bytes, config.num_stages),
        num_warps=config.num_warps,
    )
    return out


@ops.linear_int4.impl("triton")
def linear_int4(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None = None) -> Tensor:
    check_last_contiguous("linear_int4", x=x, codes=weight.codes, scales=weight.scales)
    rows = x.reshape(-1, x.shape[-1])
    most = FP8_MAX_ROWS if ROUNDS_INPUT and _int4_tiles.can_round(weight) else MAX_TILE_ROWS
    if not 0 < len(rows) <= most or weight.group_size // 2 < MIN_HALF:
        return linear_dequantized(x, weight, bias)
    return _few_rows(rows, weight, bias).view(*x.shape[:-1], weight.shape[-2])


def _few_rows(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None) -> Tensor:
    if len(x) <= MAX_ROWS:
        return multiply(x, weight, bias, config_of(x))
    if ROUNDS_INPUT and _int4_tiles.can_round(weight):
        return _int4_tiles.multiply_fp8(x, weight, bias, _int4_tiles.FP8)
    return _int4_tiles.multiply(x, weight, bias, _int4_tiles.config_of(x.dtype))
