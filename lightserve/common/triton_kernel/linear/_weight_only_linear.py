"""Product of 16- or 32-bit rows and a weight in int8 or fp8, which is widened tile by tile; and a weight as floats.

fp8 is decoded with integer operations: so it also runs on GPUs without fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.ops import Fp8Weight, Int8Weight
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.linear._eight_bit_linear import Config

MIN_BLOCK_M = 8
MIN_GROUP = 16
# not measured yet: python -m benchmark.kernels.eight_bit_linear --configs
FEW_ROWS = Config(block_n=32, block_k=256, num_warps=4, num_stages=4)
INVARIANT = Config(block_n=64, block_k=128, num_warps=4, num_stages=3)
INVARIANT_BLOCK_M = 64
DEQUANTIZE_BLOCK = 2048  # numbers of a program


@triton.jit
def _widen(codes, IS_FP8: tl.constexpr):
    """Codes as float32. The bits of e4m3 are shifted into those of float32, whose exponents are 120 larger."""
    if IS_FP8:
        bits = codes.to(tl.int32)
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return codes.to(tl.float32)


@triton.jit
def _scaled(
    weight, scale_ptrs, offset_ptrs, group, num_groups, is_row, GROUPS: tl.constexpr, HAS_OFFSETS: tl.constexpr
):
    """``weight`` ``[rows, inputs]`` of ``GROUPS`` groups from ``group`` on, times their scales, plus their offsets."""
    ROWS: tl.constexpr = weight.shape[0]
    COLUMNS: tl.constexpr = weight.shape[1]
    groups = group + tl.arange(0, GROUPS)[None, :]
    mask = is_row[:, None] & (groups < num_groups)
    grouped = tl.reshape(weight, (ROWS, GROUPS, COLUMNS // GROUPS))
    grouped *= tl.load(scale_ptrs[:, None] + groups, mask=mask, other=0.0)[:, :, None]
    if HAS_OFFSETS:
        grouped += tl.load(offset_ptrs[:, None] + groups, mask=mask, other=0.0)[:, :, None]
    return tl.reshape(grouped, (ROWS, COLUMNS))


@triton.jit(do_not_specialize=["rows"])
def _weight_only_linear_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    rows,
    out_size,
    in_size,
    x_row_stride,
    weight_row_stride,
    num_groups,
    IS_FP8: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
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
    scale_rows = (out_cols // ROWS_PER_SCALE).to(tl.int64) * num_groups
    IS_ONE_GROUP: tl.constexpr = GROUPS == 0

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(0, tl.cdiv(in_size, BLOCK_K), num_stages=NUM_STAGES):
        start = tile * BLOCK_K
        is_in = cols < in_size - start
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_in, other=0.0)
        weight = _widen(tl.load(weight_ptrs + start, mask=is_col[:, None] & is_in, other=0), IS_FP8)
        if not IS_ONE_GROUP:
            weight = _scaled(
                weight,
                scales_ptr + scale_rows,
                offsets_ptr + scale_rows if HAS_OFFSETS else None,
                tile * GROUPS,
                num_groups,
                is_col,
                GROUPS,
                HAS_OFFSETS,
            )
        elif HAS_OFFSETS:
            weight *= tl.load(scales_ptr + scale_rows, mask=is_col, other=0.0)[:, None]
            weight += tl.load(offsets_ptr + scale_rows, mask=is_col, other=0.0)[:, None]
        acc = tl.dot(weight.to(x.dtype), x.T, acc=acc, input_precision="ieee")
    if IS_ONE_GROUP and not HAS_OFFSETS:
        acc *= tl.load(scales_ptr + scale_rows, mask=is_col, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + out_cols, mask=is_col, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + out_rows[None, :] * out_size + out_cols[:, None], acc, mask=is_row[None, :] & is_col[:, None])


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    in_size,
    codes_row_stride,
    num_groups,
    IS_FP8: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < in_size
    places = row // ROWS_PER_SCALE * num_groups + cols // (in_size // num_groups)
    weight = _widen(tl.load(codes_ptr + row * codes_row_stride + cols, mask=mask, other=0), IS_FP8)
    weight *= tl.load(scales_ptr + places, mask=mask, other=0.0)
    if HAS_OFFSETS:
        weight += tl.load(offsets_ptr + places, mask=mask, other=0.0)
    tl.store(out_ptr + row * in_size + cols, weight, mask=mask)


def bytes_of(weight: Fp8Weight | Int8Weight) -> Tensor:
    """Its codes, of a dtype that every GPU loads."""
    return weight.codes.view(torch.uint8) if isinstance(weight, Fp8Weight) else weight.codes


def _rows_per_scale(weight: Fp8Weight | Int8Weight) -> int:
    return weight.rows_per_scale if isinstance(weight, Fp8Weight) else 1


def dequantize(weight: Fp8Weight | Int8Weight, dtype: torch.dtype) -> Tensor:
    (out_size, in_size), codes = weight.shape, bytes_of(weight)
    out = torch.empty((out_size, in_size), dtype=dtype, device=codes.device)
    _dequantize_kernel[(out_size, cdiv(in_size, DEQUANTIZE_BLOCK))](
        codes,
        weight.scales.contiguous(),
        weight.offsets,
        out,
        in_size,
        codes.stride(0),
        weight.scales.shape[1],
        IS_FP8=isinstance(weight, Fp8Weight),
        ROWS_PER_SCALE=_rows_per_scale(weight),
        HAS_OFFSETS=weight.offsets is not None,
        BLOCK=DEQUANTIZE_BLOCK,
    )
    return out


def can_multiply(weight: Fp8Weight | Int8Weight) -> bool:
    """Whether the kernel has tiles for the groups."""
    group = weight.group_size
    return weight.scales.shape[1] == 1 or (group >= MIN_GROUP and group & (group - 1) == 0)


def multiply(
    x: Tensor,
    weight: Fp8Weight | Int8Weight,
    bias: Tensor | None,
    config: Config = FEW_ROWS,
    block_m: int | None = None,
) -> Tensor:
    """``x`` ``[rows, in]``; ``block_m``: rows of a program, or all."""
    codes = bytes_of(weight)
    check_last_contiguous("linear", x=x, weight=codes)
    (rows, in_size), out_size, groups = x.shape, len(codes), weight.scales.shape[1]
    block_m = block_m or max(next_power_of_2(max(rows, 1)), MIN_BLOCK_M)
    block_k = config.block_k * 2 // x.element_size()  # as many bytes of float32
    block_k = block_k if groups == 1 else max(block_k, weight.group_size)
    out = x.new_empty((rows, out_size))
    if not out.numel():
        return out
    _weight_only_linear_kernel[(cdiv(out_size, config.block_n), cdiv(rows, block_m))](
        x,
        codes,
        weight.scales.contiguous(),
        weight.offsets,
        bias,
        out,
        rows,
        out_size,
        in_size,
        x.stride(0),
        codes.stride(0),
        groups,
        IS_FP8=isinstance(weight, Fp8Weight),
        ROWS_PER_SCALE=_rows_per_scale(weight),
        GROUPS=0 if groups == 1 else block_k // weight.group_size,
        HAS_OFFSETS=weight.offsets is not None,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        NUM_STAGES=stages_that_fit(
            (config.block_n + block_m * x.element_size()) * block_k, config.num_stages, config.block_n * block_k * 4
        ),
        num_warps=config.num_warps,
    )
    return out
