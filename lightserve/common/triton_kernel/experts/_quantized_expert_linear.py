"""``expert_linear`` over quantised weights: codes become numbers in the tile, in front of the product.

Scales are applied to a tile's result where all of a row's numbers in the tile have one scale, else to the numbers. Two
numbers of a byte are not moved beside each other: the low and the high ones are two products with half of ``x`` each.
No constant here is measured yet; ``benchmark/kernels/experts.py --weights`` times them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.ops import SCALE_BYTES, Int4Weight, QuantizedWeight
from lightserve.common.ops.experts import ExpertActivation
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._gpu import stages_that_fit
from lightserve.common.triton_kernel.experts._dequantize import (
    INT4,
    KINDS,
    MXFP4,
    byte_values,
    nibble_values,
    power_of_2,
)
from lightserve.common.triton_kernel.experts._expert_linear import (
    PairBlocks,
    activation_constants,
    pair_rows,
    store_pairs,
)

MIN_BLOCK_K = 32  # two products of 16 numbers, the shortest sum that tl.dot takes
MIN_EVEN_K = 128  # inputs of a tile that is made smaller so that tiles divide the inputs
LARGE_GROUP = 128  # a tile is within a group, so that scales apply to its result; smaller tiles would be too small


@dataclass(frozen=True, slots=True)
class Tile:
    block_n: int  # rows of the weight of a program
    block_k: int  # inputs of 16 bits, at most; more if a group of 4-bit numbers is larger
    num_warps: int
    num_stages: int


# By the pairs of a program.
TILES = {
    8: Tile(64, 256, 4, 3),
    16: Tile(64, 256, 4, 3),
    32: Tile(64, 128, 4, 4),
    64: Tile(128, 128, 4, 3),
    128: Tile(128, 128, 8, 3),
}
PER_ROW, PER_TILE, PER_NUMBER = (tl.constexpr(number) for number in range(3))  # where scales are applied


@triton.jit
def _x_columns(KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """The inputs of a tile that ``_load_x`` loads first: for INT4 those of the low numbers, else all."""
    cols = tl.arange(0, BLOCK_K // 2 if KIND == INT4 else BLOCK_K)
    if KIND == INT4:
        cols = cols // (GROUP // 2) * GROUP + cols % (GROUP // 2)
    return cols[None, :]


@triton.jit
def _load_x(x_ptrs, cols, is_row, left, KIND: tl.constexpr, HALF: tl.constexpr):
    """The inputs of the low numbers of bytes, and of the high ones. For one number a byte both are all inputs."""
    low = tl.load(x_ptrs, mask=is_row[:, None] & (cols < left), other=0.0)
    high = low
    if KIND == INT4:
        high = tl.load(x_ptrs + HALF, mask=is_row[:, None] & (cols + HALF < left), other=0.0)
    elif KIND == MXFP4:
        low, high = tl.split(low.reshape(low.shape[0], low.shape[1] // 2, 2))
    return low, high


@triton.jit
def _load_scales(ptrs, mask, KIND: tl.constexpr):
    scales = tl.load(ptrs, mask=mask, other=0)
    return power_of_2(scales) if KIND == MXFP4 else scales


@triton.jit
def _scaled(values, scales, offsets, KIND: tl.constexpr):
    """``values`` ``[rows, groups * length]``, each times the scale ``[rows, groups]`` of its group."""
    DTYPE: tl.constexpr = values.dtype
    grouped = values.reshape(scales.shape[0], scales.shape[1], values.shape[1] // scales.shape[1])
    if KIND == MXFP4 and tl.bfloat16 == DTYPE:  # exact, for bfloat16 has all of these powers of 2
        grouped *= scales.to(DTYPE)[:, :, None]
    else:
        grouped = grouped.to(tl.float32) * scales[:, :, None]
    if offsets is not None:
        grouped += offsets[:, :, None]
    return grouped.reshape(values.shape[0], values.shape[1]).to(DTYPE)


@triton.jit
def _multiply(codes, x, x_high, scales, offsets, KIND: tl.constexpr, SCALING: tl.constexpr):
    """Codes times inputs, ``[rows of the weight, pairs]``."""
    DTYPE: tl.constexpr = x.dtype
    if KIND == INT4 or KIND == MXFP4:  # noqa: SIM109  Triton has no "in"
        low, high = nibble_values(codes & 0x0F, KIND, DTYPE), nibble_values(codes >> 4, KIND, DTYPE)
        if SCALING == PER_NUMBER:
            low, high = _scaled(low, scales, offsets, KIND), _scaled(high, scales, offsets, KIND)
        low_product = tl.dot(low, x.T, input_precision="ieee")
        return tl.dot(high, x_high.T, acc=low_product, input_precision="ieee")
    values = byte_values(codes, KIND, DTYPE)
    if SCALING == PER_NUMBER:
        values = _scaled(values, scales, offsets, KIND)
    return tl.dot(values, x.T, input_precision="ieee")


@triton.jit
def _sum_of_inputs(x, x_high, NUMBERS: tl.constexpr):
    """For the offsets, which are added to all numbers of a group: ``[1, pairs]``."""
    total = tl.sum(x.to(tl.float32), axis=1)
    if NUMBERS == 2:
        total += tl.sum(x_high.to(tl.float32), axis=1)
    return total[None, :]


@triton.jit(do_not_specialize=["n_blocks"])
def _quantized_expert_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    blocks_ptr,
    pairs_ptr,
    out_size,
    in_size,
    code_size,  # bytes of a row; the compiler would not know by what a quotient of in_size can be divided
    n_groups,
    n_blocks,
    x_row_stride,
    codes_expert_stride,
    codes_row_stride,
    scales_expert_stride,
    scales_row_stride,
    PAIRS_A_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_RELU2: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr,
    KIND: tl.constexpr,
    NUMBERS: tl.constexpr,  # of a byte
    GROUP: tl.constexpr,
    SCALING: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert = tl.load(blocks_ptr + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    rows, x_rows, is_row = pair_rows(blocks_ptr, pairs_ptr, n_blocks, PAIRS_A_ROW, BLOCK_M)
    weight_rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    is_weight_row = weight_rows < out_size
    weight_rows = weight_rows.to(tl.int64)
    HALF: tl.constexpr = GROUP // 2
    code_cols = tl.arange(0, BLOCK_K // NUMBERS)[None, :]
    cols = _x_columns(KIND, GROUP, BLOCK_K)
    groups = tl.arange(0, BLOCK_K // GROUP if SCALING == PER_NUMBER else 1)[None, :]
    x_ptrs = x_ptr + x_rows[:, None] * x_row_stride + cols
    codes_ptrs = codes_ptr + expert * codes_expert_stride + weight_rows * codes_row_stride + code_cols
    at = expert * scales_expert_stride + weight_rows * scales_row_stride + groups

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_sum = tl.zeros([1, BLOCK_M], tl.float32)
    for tile in tl.range(0, tl.cdiv(in_size, BLOCK_K), num_stages=STAGES):
        left = BLOCK_K if IS_EVEN else in_size - tile * BLOCK_K
        x, x_high = _load_x(x_ptrs + tile * BLOCK_K, cols, is_row, left, KIND, HALF)
        start = tile * (BLOCK_K // NUMBERS)
        is_code = code_cols < (BLOCK_K if IS_EVEN else code_size - start)
        codes = tl.load(codes_ptrs + start, mask=is_weight_row & is_code, other=0)
        scales, offsets = None, None
        if SCALING != PER_ROW:
            group = tile * (BLOCK_K // GROUP) if BLOCK_K >= GROUP else tile // (GROUP // BLOCK_K)
            is_scale = is_weight_row & (groups < n_groups - group)
            scales = _load_scales(scales_ptr + at + group, is_scale, KIND)
            if offsets_ptr is not None:
                offsets = tl.load(offsets_ptr + at + group, mask=is_scale, other=0.0)
        product = _multiply(codes, x, x_high, scales, offsets, KIND, SCALING)
        if SCALING == PER_TILE:
            product *= scales
        if offsets_ptr is not None and SCALING != PER_NUMBER:
            tile_sum = _sum_of_inputs(x, x_high, NUMBERS)
            x_sum += tile_sum if SCALING == PER_ROW else 0.0
            product += offsets * tile_sum if SCALING == PER_TILE else 0.0
        acc += product
    if SCALING == PER_ROW:
        acc *= _load_scales(scales_ptr + at, is_weight_row, KIND)
        if offsets_ptr is not None:
            acc += tl.load(offsets_ptr + at, mask=is_weight_row, other=0.0) * x_sum
    store_pairs(
        acc,
        bias_ptr,
        out_ptr,
        expert,
        rows,
        is_row,
        out_size,
        IS_GATED,
        IS_RELU2,
        ALPHA,
        LIMIT,
        UP_OFFSET,
        CUBIC,
        LIMITS_ACTIVATED,
    )


def block_k_of(weight: QuantizedWeight, most: int) -> int:
    """Inputs of a tile: a part of a group, or whole groups."""
    in_size, group = weight.shape[-1], weight.group_size
    wanted = max(min(most, next_power_of_2(in_size)), MIN_BLOCK_K)
    if isinstance(weight, Int4Weight):  # whole groups
        return group if group >= LARGE_GROUP else max(wanted, group)
    if weight.scales.shape[-1] == 1:
        half = wanted // 2
        return half if half >= MIN_EVEN_K and in_size % wanted and in_size % half == 0 else wanted
    power = group & -group  # the largest power of 2 that divides it
    if power == group and group < min(wanted, LARGE_GROUP):
        return wanted
    if min(power, wanted) < MIN_BLOCK_K:
        raise ValueError(f"experts: groups of {group} numbers have no tiles; supported are multiples of {MIN_BLOCK_K}")
    return min(power, wanted)


def groups_to_load(weight: QuantizedWeight) -> int:
    """Of a row. Scales of a byte are loaded several at once, which is why their rows are padded."""
    groups, stride = weight.scales.shape[-1], weight.scales.stride(-2)
    is_padded = weight.scales.dtype == torch.uint8 and stride % SCALE_BYTES == 0 and stride >= groups
    return cdiv(groups, SCALE_BYTES) * SCALE_BYTES if is_padded else groups


def _scaling(weight: QuantizedWeight, block_k: int) -> int:
    if weight.scales.shape[-1] == 1:
        return int(PER_ROW.value)
    return int((PER_TILE if block_k <= weight.group_size else PER_NUMBER).value)


def quantized_expert_linear(
    x: Tensor,
    weight: QuantizedWeight,
    blocks: PairBlocks,
    block_m: int,
    bias: Tensor | None = None,
    activation: ExpertActivation | None = None,
) -> Tensor:
    """As ``expert_linear``. ``block_m``: pairs of a block."""
    n_pairs = blocks.count if blocks.pairs is None else len(blocks.pairs)
    tile = TILES[block_m]
    out_size, in_size = weight.shape[-2:]
    block_k = block_k_of(weight, tile.block_k * 2 // x.element_size())
    out = x.new_empty((n_pairs, out_size // (1 if activation is None else activation.rows_per_unit)))
    tile_bytes = block_m * block_k * x.element_size() + tile.block_n * block_k // weight.codes_per_byte
    converted_bytes = tile.block_n * block_k * x.element_size()  # a tile's numbers may pass through shared memory
    stages = stages_that_fit(tile_bytes, tile.num_stages, converted_bytes)
    _quantized_expert_linear_kernel[(cdiv(out_size, tile.block_n), blocks.count)](
        x,
        weight.codes.view(torch.uint8),
        weight.scales,
        weight.offsets,
        bias,
        out,
        blocks.blocks,
        blocks.pairs,
        out_size,
        in_size,
        weight.codes.shape[-1],
        groups_to_load(weight),
        blocks.count,
        x.stride(0),
        weight.codes.stride(0),
        weight.codes.stride(-2),
        weight.scales.stride(0),
        weight.scales.stride(-2),
        PAIRS_A_ROW=None if activation is None else blocks.top_k,
        KIND=KINDS[type(weight)],
        NUMBERS=weight.codes_per_byte,
        GROUP=weight.group_size,
        SCALING=_scaling(weight, block_k),
        IS_EVEN=in_size % block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        num_warps=tile.num_warps,
        num_stages=stages,
        **activation_constants(activation),
    )
    return out
