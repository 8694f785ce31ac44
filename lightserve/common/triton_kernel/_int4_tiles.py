"""Matmul with 4-bit weights for more rows: a tile of weights times a tile of inputs, group by group.

The tiles have the same size for any number of rows, so a result does not depend on the other rows of the batch.

With inputs in fp8, a nibble needs no conversion: the bits of a number n from 0 to 15, read as e4m3, are n / 512. The 8
that is missing is an offset of the group, which needs the sum of the group's input, as other offsets do.
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
from lightserve.common.triton_kernel._int4 import unpack_int4, uses_asm

FP8_MIN_GROUP = 64  # halves of it: the shortest sum of tl.dot in fp8 is 32


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int  # rows of the input for each program
    block_n: int  # rows of the weight
    num_warps: int
    num_stages: int


# Not measured yet: see benchmark/quantized_linear.py.
TILES = Config(block_m=64, block_n=64, num_warps=4, num_stages=4)
FLOAT32 = Config(block_m=32, block_n=32, num_warps=4, num_stages=2)  # larger tiles compile slowly
FP8 = Config(block_m=64, block_n=128, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["rows"])
def _int4_tiles_kernel(
    x_ptr,
    x_scales_ptr,
    x_sums_ptr,
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
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``x_scales`` and ``x_sums``: of inputs in fp8."""
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
    for group in tl.range(0, num_groups, num_stages=STAGES):
        codes = tl.load(codes_ptrs + group * HALF, mask=is_col[:, None], other=0)
        x_low = tl.load(x_ptrs + group * (2 * HALF), mask=is_row[:, None], other=0.0)
        x_high = tl.load(x_ptrs + group * (2 * HALF) + HALF, mask=is_row[:, None], other=0.0)
        scales = tl.load(scales_ptr + scale_places + group, mask=is_col, other=0.0)
        if x_scales_ptr is not None:
            low = (codes & 0x0F).to(tl.float8e4nv, bitcast=True)
            high = (codes >> 4).to(tl.float8e4nv, bitcast=True)
            product = tl.dot(low, x_low.T)
            product = tl.dot(high, x_high.T, acc=product)
            x_scales = tl.load(x_scales_ptr + in_rows * num_groups + group, mask=is_row, other=0.0)
            x_sums = tl.load(x_sums_ptr + in_rows * num_groups + group, mask=is_row, other=0.0)
            offsets = -8.0 * scales
            if offsets_ptr is not None:
                offsets += tl.load(offsets_ptr + scale_places + group, mask=is_col, other=0.0)
            acc += product * (scales * 512.0)[:, None] * x_scales[None, :] + offsets[:, None] * x_sums[None, :]
        else:
            low, high = unpack_int4(codes, dtype, USE_ASM)
            product = tl.dot(low, x_low.T, input_precision="ieee")
            product = tl.dot(high, x_high.T, acc=product, input_precision="ieee")
            acc += product * scales[:, None]
            if offsets_ptr is not None:
                offsets = tl.load(offsets_ptr + scale_places + group, mask=is_col, other=0.0)
                sums = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), axis=1)
                acc += offsets[:, None] * sums[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + in_rows[None, :] * out_size + out_cols[:, None], acc, mask=is_row[None, :] & is_col[:, None])


@triton.jit
def _round_groups_kernel(
    x_ptr, codes_ptr, scales_ptr, sums_ptr, num_groups, x_row_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """fp8 codes and a scale for each group of a row, and the sum of what they stand for. One program: some groups."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_group = groups < num_groups
    places = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_row_stride + places, mask=is_group[:, None], other=0.0).to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(x), axis=1) / 448.0, 1e-30)
    codes = (x / scales[:, None]).to(tl.float8e4nv)
    tl.store(codes_ptr + row * num_groups * GROUP + places, codes, mask=is_group[:, None])
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=is_group)
    sums = tl.sum(codes.to(tl.float32), axis=1) * scales
    tl.store(sums_ptr + row * num_groups + groups, sums, mask=is_group)


def config_of(dtype: torch.dtype) -> Config:
    return FLOAT32 if dtype == torch.float32 else TILES


def can_round(weight: ops.Int4Weight) -> bool:
    return weight.group_size >= FP8_MIN_GROUP


def multiply(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[rows, in]``; groups are of at least 32."""
    return _launch(x, None, None, weight, bias, x.new_empty((len(x), weight.shape[-2])), config=config)


def multiply_fp8(x: Tensor, weight: ops.Int4Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``multiply`` with inputs rounded to fp8, with a scale for each row and group."""
    (rows, in_size), num_groups = x.shape, weight.scales.shape[-1]
    codes = torch.empty((rows, in_size), dtype=torch.float8_e4m3fn, device=x.device)
    scales, sums = (x.new_empty((rows, num_groups), dtype=torch.float32) for _ in range(2))
    block = 16
    _round_groups_kernel[(rows, cdiv(num_groups, block))](
        x, codes, scales, sums, num_groups, x.stride(0), GROUP=weight.group_size, BLOCK=block, num_warps=4
    )
    return _launch(codes, scales, sums, weight, bias, x.new_empty((rows, weight.shape[-2])), config=config)


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    x_sums: Tensor | None,
    weight: ops.Int4Weight,
    bias: Tensor | None,
    out: Tensor,
    *,
    config: Config,
) -> Tensor:
    rows, out_size = out.shape
    half = weight.group_size // 2
    tile_bytes = half * (config.block_n + 2 * config.block_m * x.element_size())
    _int4_tiles_kernel[(cdiv(out_size, config.block_n), cdiv(rows, config.block_m))](
        x,
        x_scales,
        x_sums,
        weight.codes,
        weight.scales,
        weight.offsets,
        bias,
        out,
        rows,
        out_size,
        weight.scales.shape[-1],
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
    return out
