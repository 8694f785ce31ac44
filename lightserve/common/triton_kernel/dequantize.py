"""Matmul with 4-bit weights that are dequantised to a scratch buffer first, for many rows.

The buffer holds some of the output rows at a time. That bounds its memory, and it stays in the L2 cache.
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

SCRATCH_BYTES = 32 * 2**20  # not measured: the L2 cache of an H200 has 50 MB
ROW_MULTIPLE = 128  # output rows of a part: cuBLAS has tiles of 128
BLOCK_N, BLOCK_BYTES = 4, 512  # of the codes in a program; not measured

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
    groups = out_rows * scales_row_stride + places // HALF
    codes = tl.load(codes_ptr + out_rows * codes_row_stride + places, mask=mask, other=0)
    scales = tl.load(scales_ptr + groups, mask=mask, other=0.0)
    low, high = (codes & 0x0F).to(tl.int32), (codes >> 4).to(tl.int32)
    if codebook_ptr is not None:
        low, high = tl.load(codebook_ptr + low) * scales, tl.load(codebook_ptr + high) * scales
    else:
        low, high = (low - 8).to(tl.float32) * scales, (high - 8).to(tl.float32) * scales
    if offsets_ptr is not None:
        offsets = tl.load(offsets_ptr + groups, mask=mask, other=0.0)
        low, high = low + offsets, high + offsets
    out_ptrs = out_ptr + out_rows * out_row_stride + places + places // HALF * HALF
    tl.store(out_ptrs, low, mask=mask)
    tl.store(out_ptrs + HALF, high, mask=mask)


@triton.jit
def _e2m1(codes):
    """The number of each code: sign, two bits of exponent, one of mantissa."""
    size = codes & 7
    number = tl.where(size < 2, size * 2, (2 + (size & 1)) << (size >> 1)).to(tl.float32) * 0.25
    return tl.where(codes < 8, number, -number)


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
    scales = (exponents << 23).to(tl.float32, bitcast=True)
    numbers = tl.interleave(_e2m1(codes & 0x0F) * scales, _e2m1(codes >> 4) * scales)
    out_places = tl.program_id(1) * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
    out_mask = (out_rows < out_size) & (out_places < 2 * row_bytes)
    tl.store(out_ptr + out_rows * out_row_stride + out_places, numbers, mask=out_mask)


def dequantize(weight: PackedWeight, out: Tensor) -> Tensor:
    """Fill ``out`` ``[out, in]`` with the weight."""
    out_size, row_bytes = weight.codes.shape
    block_bytes = min(BLOCK_BYTES, next_power_of_2(row_bytes))
    grid = cdiv(out_size, BLOCK_N), cdiv(row_bytes, block_bytes)
    sizes = {"HALF": weight.group_size // 2, "BLOCK_N": BLOCK_N, "BLOCK_BYTES": block_bytes}
    strides = weight.codes.stride(0), weight.scales.stride(0), out.stride(0)
    if isinstance(weight, Mxfp4Weight):
        _dequantize_mxfp4_kernel[grid](weight.codes, weight.scales, out, out_size, row_bytes, *strides, **sizes)
        return out
    codebook = weight.codebook if isinstance(weight, Codebook4Weight) else None
    _dequantize_packed_kernel[grid](
        weight.codes, weight.scales, weight.offsets, codebook, out, out_size, row_bytes, *strides, **sizes
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
    part = rows_of_part(in_size, x.element_size())
    scratch = x.new_empty((min(part, out_size), in_size))
    for begin in range(0, out_size if len(rows) else 0, part):
        own = slice(begin, min(begin + part, out_size))
        dequantized = dequantize(weight.rows(own), scratch[: own.stop - begin])
        product(rows, dequantized, None if bias is None else bias[own], out[:, own])
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
