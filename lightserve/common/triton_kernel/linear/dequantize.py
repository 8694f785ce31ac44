"""Matmul with 4-bit weights that are dequantised to a scratch buffer first, for many rows.

The buffer holds some of the output rows at a time, which bounds its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import Codebook4Weight, Int4Weight, Mxfp4Weight
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.experts._dequantize import MXFP4, nibble_values, power_of_2
from lightserve.common.triton_kernel.linear._int4 import scaled_int4, uses_asm
from lightserve.common.triton_kernel.linear._tiled_int4 import (
    ROWS_OF_TILE,
    TILE_ROWS,
    TiledInt4Weight,
    groups_of_tiles,
)

# Parts that stay in the L2 cache are no faster: 32 MiB take 382 us of 896 rows of [28672, 4096] on an H200, where one
# part of 256 MiB takes 365, and 182 us of 256 rows instead of 174.
SCRATCH_BYTES = 256 * 2**20
ROW_MULTIPLE = 128  # output rows of a part: cuBLAS has tiles of 128
# Of the codes in a program. An H200 dequantises [28672, 4096] in 82 us; with 4 rows of 512 bytes in 93 us.
BLOCK_N, BLOCK_BYTES = 1, 2048

TILE_GROUPS = 1  # of a row of tiles in a program: [28672, 4096] takes 86 us, with 4 of them 91

PackedWeight = Int4Weight | Codebook4Weight | Mxfp4Weight
Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], object]  # of x, weight and bias, to a part of the output


@triton.jit
def _dequantize_packed_kernel(
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    codebook_ptr,
    out_ptr,
    out_size,
    num_groups,
    codes_row_stride,
    scales_row_stride,
    out_row_stride,
    USE_ASM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A tile ``[rows, groups, bytes]``: each thread has bytes of one group, and loads its scale once."""
    out_rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
    places = tl.arange(0, HALF)[None, None, :]
    is_group = (out_rows < out_size) & (groups < num_groups)
    mask = is_group[:, :, None]
    codes_ptrs = codes_ptr + (out_rows * codes_row_stride + groups * HALF)[:, :, None] + places
    codes = tl.load(codes_ptrs, mask=mask, other=0)
    scales = tl.load(scales_ptr + out_rows * scales_row_stride + groups, mask=is_group, other=0.0)
    offsets = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    if offsets_ptr is not None:
        offsets = tl.load(offsets_ptr + out_rows * scales_row_stride + groups, mask=is_group, other=0.0)
    if codebook_ptr is not None:
        low = tl.load(codebook_ptr + (codes & 0x0F).to(tl.int32)) * scales[:, :, None]
        high = tl.load(codebook_ptr + (codes >> 4).to(tl.int32)) * scales[:, :, None]
    else:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        low, high = scaled_int4(codes, scales[:, :, None], offsets[:, :, None], dtype, USE_ASM)
    out_ptrs = out_ptr + (out_rows * out_row_stride + groups * (2 * HALF))[:, :, None] + places
    tl.store(out_ptrs, low, mask=mask)
    tl.store(out_ptrs + HALF, high, mask=mask)


@triton.jit
def _dequantize_tiles_kernel(
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    num_groups,
    scales_row_stride,
    scales_group_stride,
    out_row_stride,
    USE_ASM: tl.constexpr,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Some groups of a row of tiles: see ``_tiled_int4.py``."""
    tile = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    is_group = groups < num_groups
    bytes_of_tile = tl.arange(0, ROWS_OF_TILE * HALF)[None, :]
    codes_ptrs = codes_ptr + (tile * num_groups + groups)[:, None] * (ROWS_OF_TILE * HALF) + bytes_of_tile
    codes = tl.load(codes_ptrs, mask=is_group[:, None], other=0)[:, None, :]
    codes = groups_of_tiles(codes, GROUPS, ROWS_OF_TILE, HALF).permute(1, 0, 2)
    rows = tile * ROWS_OF_TILE + tl.arange(0, ROWS_OF_TILE)
    scale_places = rows[:, None] * scales_row_stride + groups[None, :] * scales_group_stride
    scales = tl.load(scales_ptr + scale_places, mask=is_group[None, :], other=0.0)
    offsets = tl.zeros([ROWS_OF_TILE, GROUPS], tl.float32)
    if offsets_ptr is not None:
        offsets = tl.load(offsets_ptr + scale_places, mask=is_group[None, :], other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    low, high = scaled_int4(codes, scales[:, :, None], offsets[:, :, None], dtype, USE_ASM)
    out_ptrs = out_ptr + (rows[:, None] * out_row_stride + groups[None, :] * (2 * HALF))[:, :, None]
    out_ptrs += tl.arange(0, HALF)[None, None, :]
    tl.store(out_ptrs, low, mask=is_group[None, :, None])
    tl.store(out_ptrs + HALF, high, mask=is_group[None, :, None])


@triton.jit
def _dequantize_mxfp4_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    out_size,
    row_bytes,
    codes_row_stride,
    scales_row_stride,
    out_row_stride,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    out_rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    places = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    mask = (out_rows < out_size) & (places < row_bytes)
    codes = tl.load(codes_ptr + out_rows * codes_row_stride + places, mask=mask, other=0).to(tl.int32)
    exponents = tl.load(scales_ptr + out_rows * scales_row_stride + places // HALF, mask=mask, other=0).to(tl.int32)
    scales = power_of_2(exponents)
    low, high = nibble_values(codes & 0x0F, MXFP4, tl.float32), nibble_values(codes >> 4, MXFP4, tl.float32)
    numbers = tl.interleave(low * scales, high * scales)
    out_places = tl.program_id(1) * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    out_mask = (out_rows < out_size) & (out_places < 2 * row_bytes)
    tl.store(out_ptr + out_rows * out_row_stride + out_places, numbers, mask=out_mask)


def dequantize(weight: PackedWeight, out: Tensor) -> Tensor:
    """Fill ``out`` ``[out, in]`` with the weight."""
    out_size, row_bytes = weight.codes.shape
    half, strides = weight.group_size // 2, (weight.codes.stride(0), weight.scales.stride(0), out.stride(0))
    if isinstance(weight, Mxfp4Weight):
        block = min(BLOCK_BYTES, next_power_of_2(row_bytes))
        _dequantize_mxfp4_kernel[(cdiv(out_size, BLOCK_N), cdiv(row_bytes, block))](
            weight.codes,
            weight.scales,
            out,
            out_size,
            row_bytes,
            *strides,
            HALF=half,
            BLOCK_N=BLOCK_N,
            BLOCK_BYTES=block,
        )
        return out
    num_groups = weight.scales.shape[1]
    if isinstance(weight, TiledInt4Weight):
        groups = min(TILE_GROUPS, next_power_of_2(num_groups))
        _dequantize_tiles_kernel[(out_size // TILE_ROWS, cdiv(num_groups, groups))](
            weight.codes,
            weight.scales,
            weight.offsets,
            out,
            num_groups,
            *weight.scales.stride(),
            out.stride(0),
            USE_ASM=uses_asm(out.dtype),
            HALF=half,
            GROUPS=groups,
        )
        return out
    groups = min(BLOCK_BYTES // half, next_power_of_2(num_groups))
    _dequantize_packed_kernel[(cdiv(out_size, BLOCK_N), cdiv(num_groups, groups))](
        weight.codes,
        weight.scales,
        weight.offsets,
        weight.codebook if isinstance(weight, Codebook4Weight) else None,
        out,
        out_size,
        num_groups,
        *strides,
        USE_ASM=uses_asm(out.dtype),
        HALF=half,
        BLOCK_N=BLOCK_N,
        GROUPS=groups,
    )
    return out


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def linear_dequantized(x: Tensor, weight: PackedWeight, bias: Tensor | None, product: Product = _matmul) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[..., in]``. Each call allocates its buffer: CUDA graphs share one pool."""
    rows, (out_size, in_size) = x.reshape(-1, x.shape[-1]), weight.shape
    out = x.new_empty((len(rows), out_size))
    part_rows = rows_of_part(in_size, x.element_size())
    scratch = x.new_empty((min(part_rows, out_size), in_size))
    for begin in range(0, out_size if len(rows) else 0, part_rows):
        outputs = slice(begin, min(begin + part_rows, out_size))
        dequantized = dequantize(weight.rows(outputs), scratch[: outputs.stop - begin])
        product(rows, dequantized, None if bias is None else bias[outputs], out[:, outputs])
    return out.view(*x.shape[:-1], out_size)


def rows_of_part(in_size: int, element_size: int) -> int:
    """Output rows whose weights fill the buffer."""
    return max(SCRATCH_BYTES // (in_size * element_size) // ROW_MULTIPLE, 1) * ROW_MULTIPLE


@ops.linear_codebook4.impl("triton")
def linear_codebook4(x: Tensor, weight: Codebook4Weight, bias: Tensor | None = None) -> Tensor:
    """For any number of rows: nf4 checkpoints are made for fine-tuning, and are seldom served."""
    check_last_contiguous("linear_codebook4", x=x, codes=weight.codes, scales=weight.scales)
    return linear_dequantized(x, weight, bias)


@ops.linear_mxfp4.impl("triton")
def linear_mxfp4(x: Tensor, weight: Mxfp4Weight, bias: Tensor | None = None) -> Tensor:
    """For any number of rows: most models have MXFP4 in their experts only."""
    check_last_contiguous("linear_mxfp4", x=x, codes=weight.codes, scales=weight.scales)
    return linear_dequantized(x, weight, bias)
