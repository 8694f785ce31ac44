"""A product of the pairs of tokens and experts with the weights of their experts.

A program multiplies a few rows of one expert's weight with a block of pairs. The weight is the left operand, as in
``linear``: few tokens choose an expert, and its weight is what has to be read. Programs with neighbouring numbers read
neighbouring rows of one weight. So an expert with several blocks is read from memory once, and then from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.ops.experts import ExpertActivation, GatedSilu, Relu2
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._gpu import stages_that_fit

MIN_BLOCK_K = 16  # the shortest sum that tl.dot takes


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int  # pairs of a program, at least 8
    block_n: int  # rows of the weight of a program
    block_bytes: int  # of each of these rows in a tile
    num_warps: int
    num_stages: int

    def block_k(self, in_size: int, item_bytes: int) -> int:
        """Columns of a tile: a number that divides ``in_size``, if there is one that is not much smaller."""
        most = min(self.block_bytes // item_bytes, max(next_power_of_2(in_size), MIN_BLOCK_K))
        return next((size for size in (most, most // 2, most // 4) if size >= 64 and in_size % size == 0), most)


@dataclass(frozen=True, slots=True)
class PairBlocks:
    """Which pairs each program computes.

    Sorted: ``blocks`` and ``pairs`` of ``SortedPairs``. Not sorted: ``blocks`` has the experts of the pairs; each pair
    is then a block and a row of its own, and ``pairs`` is None.
    """

    blocks: Tensor  # int32
    pairs: Tensor | None
    top_k: int

    @property
    def count(self) -> int:
        return self.blocks.shape[1] if self.pairs is not None else self.blocks.numel()


@triton.jit
def gated_silu(
    gate,
    up,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr,
):
    if LIMIT is not None:
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if not LIMITS_ACTIVATED:
            gate = tl.minimum(gate, LIMIT)
    argument = gate
    if CUBIC != 0:
        argument += CUBIC * gate * gate * gate
    activated = gate * tl.sigmoid(ALPHA * argument)
    if LIMITS_ACTIVATED:
        activated = tl.minimum(activated, LIMIT)
    return (up + UP_OFFSET) * activated


@triton.jit
def relu2(x):
    x = tl.maximum(x, 0.0)
    return x * x


def activation_constants(activation: ExpertActivation | None) -> dict[str, Any]:
    """What kernels with an activation are compiled for; None: they have none."""
    gated = activation if isinstance(activation, GatedSilu) else GatedSilu()
    return {
        "IS_GATED": isinstance(activation, GatedSilu),
        "IS_RELU2": isinstance(activation, Relu2),
        "ALPHA": gated.alpha,
        "LIMIT": gated.limit,
        "UP_OFFSET": gated.up_offset,
        "CUBIC": gated.cubic,
        "LIMITS_ACTIVATED": gated.limits_activated,
    }


@triton.jit
def pair_rows(blocks_ptr, pairs_ptr, n_blocks, PAIRS_A_ROW: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of this program's block: the rows of its pairs in the result and in x, and which of these there are."""
    block = tl.program_id(1)
    if pairs_ptr is None:
        rows = block + tl.arange(0, BLOCK_M)
        is_row = tl.arange(0, BLOCK_M) < 1
        pairs = rows
    else:
        rows = tl.load(blocks_ptr + n_blocks + block) + tl.arange(0, BLOCK_M)
        is_row = rows < tl.load(blocks_ptr + 2 * n_blocks + block)
        pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0)
    rows = rows.to(tl.int64)
    x_rows = rows
    if PAIRS_A_ROW is not None:  # x has a row for each token, not for each pair
        x_rows = (pairs // PAIRS_A_ROW).to(tl.int64)
    return rows, x_rows, is_row


@triton.jit
def store_pairs(
    acc,
    bias_ptr,
    out_ptr,
    expert,
    rows,
    is_row,
    out_size,
    IS_GATED: tl.constexpr,
    IS_RELU2: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr,
):
    """Store ``acc`` ``[rows of the weight, pairs]`` of this program, after bias and activation."""
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    if bias_ptr is not None:
        weight_rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + expert * out_size + weight_rows, mask=weight_rows < out_size, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = tl.split(acc.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
        acc = gated_silu(gate, up, ALPHA, LIMIT, UP_OFFSET, CUBIC, LIMITS_ACTIVATED)
    if IS_RELU2:
        acc = relu2(acc)
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    width = out_size // PARTS
    out_cols = (tl.program_id(0) * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS))[:, None]
    tl.store(out_ptr + rows[None, :] * width + out_cols, acc, mask=is_row[None, :] & (out_cols < width))


@triton.jit(do_not_specialize=["n_blocks"])
def _expert_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    blocks_ptr,
    pairs_ptr,
    out_size,
    in_size,
    n_blocks,
    x_row_stride,
    weight_expert_stride,
    weight_row_stride,
    PAIRS_A_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_RELU2: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMITS_ACTIVATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.load(blocks_ptr + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    rows, x_rows, is_row = pair_rows(blocks_ptr, pairs_ptr, n_blocks, PAIRS_A_ROW, BLOCK_M)
    weight_rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_weight_row = weight_rows < out_size
    cols = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + x_rows[:, None] * x_row_stride + cols
    weight_ptr += expert * weight_expert_stride
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * weight_row_stride + cols

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_in = cols < (BLOCK_K if IS_EVEN else in_size - start)
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_in, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=is_weight_row[:, None] & is_in, other=0.0)
        acc = tl.dot(weight, x.T, acc=acc, input_precision="ieee")
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


def expert_linear(
    x: Tensor,
    weight: Tensor,
    blocks: PairBlocks,
    config: Config,
    bias: Tensor | None = None,
    activation: ExpertActivation | None = None,
) -> Tensor:
    """``weight[expert] @ x`` for each pair, in the rows of the pairs, with ``activation``.

    With an activation ``x`` has a row for each token, else one for each pair, in the same order as the result.
    ``config.block_m`` is that of the blocks.
    """
    n_pairs = blocks.count if blocks.pairs is None else len(blocks.pairs)
    out_size, in_size = weight.shape[1:]
    block_k = config.block_k(in_size, x.element_size())
    out = x.new_empty((n_pairs, out_size // (1 if activation is None else activation.rows_per_unit)))
    _expert_linear_kernel[(cdiv(out_size, config.block_n), blocks.count)](
        x,
        weight,
        bias,
        out,
        blocks.blocks,
        blocks.pairs,
        out_size,
        in_size,
        blocks.count,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        PAIRS_A_ROW=None if activation is None else blocks.top_k,
        IS_EVEN=in_size % block_k == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=stages_that_fit((config.block_n + config.block_m) * block_k * x.element_size(), config.num_stages),
        **activation_constants(activation),
    )
    return out
