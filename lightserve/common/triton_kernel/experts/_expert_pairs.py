"""Sort the pairs of tokens and experts by expert, and cut them into blocks of one expert: one program for an expert.

Every program counts the pairs of all experts, so that no program waits for another one, and nothing has to be set to 0
before. The grids of the products are bounded by shapes: ``n_blocks`` blocks suffice for any choice of experts, and
surplus blocks have no expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import next_power_of_2

NO_EXPERT = tl.constexpr(ops.NO_EXPERT)
BLOCKS = (256, 1024, 4096)  # pairs that a program reads at once; few sizes, for each is compiled


class SortedPairs(NamedTuple):
    """Pairs by expert, in the order of their numbers; pairs without an expert are last."""

    pairs: Tensor  # [pairs] int32: the pair in each sorted row, token * top_k + k_idx
    rows: Tensor  # [pairs] int32: the sorted row of each pair
    ends: Tensor  # [experts] int32: the row behind an expert's last one
    blocks: Tensor  # [3, blocks] int32: expert, first row, and the row behind the last one


@triton.jit
def _experts_of(ids_ptr, start, n_pairs, n_experts, NO_PAIR: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs from ``start`` on and their experts: ``n_experts`` for those without one, ``NO_PAIR`` behind the last."""
    pairs = start + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + pairs, mask=pairs < n_pairs, other=0)
    ids = tl.where((ids < 0) | (ids >= n_experts), n_experts, ids)
    return pairs, tl.where(pairs < n_pairs, ids, NO_PAIR)


@triton.jit(do_not_specialize=["n_pairs", "n_blocks", "block_m"])
def _sort_pairs_kernel(
    ids_ptr,
    pairs_ptr,
    rows_ptr,
    ends_ptr,
    blocks_ptr,
    n_pairs,
    n_experts,
    n_blocks,
    block_m,  # not a constant: it would multiply the kernels to compile
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)  # the last program places the pairs without an expert
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, n_pairs, BLOCK):
        _, ids = _experts_of(ids_ptr, start, n_pairs, n_experts, BINS - 1, BLOCK)
        counts += tl.histogram(ids, BINS)
    first = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    end = first + tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    block_counts = tl.where(bins < n_experts, (counts + block_m - 1) // block_m, 0)
    first_block = tl.sum(tl.where(bins < expert, block_counts, 0), axis=0)
    tl.store(ends_ptr + expert, end, mask=expert < n_experts)

    placed = first
    for start in range(0, n_pairs, BLOCK):
        pairs, ids = _experts_of(ids_ptr, start, n_pairs, n_experts, BINS - 1, BLOCK)
        is_own = ids == expert
        rows = placed + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(pairs_ptr + rows, pairs, mask=is_own)
        tl.store(rows_ptr + pairs, rows, mask=is_own)
        placed += tl.sum(is_own.to(tl.int32), axis=0)

    own_blocks = tl.where(expert < n_experts, (end - first + block_m - 1) // block_m, n_blocks - first_block)
    for start in range(0, own_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        is_block = block < own_blocks
        begin = first + block * block_m
        ptrs = blocks_ptr + first_block + block
        tl.store(ptrs, tl.where(expert < n_experts, expert, NO_EXPERT) + tl.zeros_like(block), mask=is_block)
        tl.store(ptrs + n_blocks, begin, mask=is_block)
        tl.store(ptrs + 2 * n_blocks, tl.minimum(begin + block_m, end), mask=is_block)


def max_blocks(n_pairs: int, n_experts: int, block_m: int) -> int:
    """The most blocks that pairs can need: each expert with pairs may have one that is not full."""
    partial = min(n_pairs, n_experts)
    return partial + (n_pairs - partial) // block_m


def sort_pairs(ids: Tensor, n_experts: int, block_m: int) -> SortedPairs:
    """The pairs ``ids`` ``[tokens, top_k]``, contiguous, in blocks of ``block_m`` rows."""
    n_pairs = ids.numel()
    n_blocks = max_blocks(n_pairs, n_experts, block_m)
    sizes = (n_pairs, n_pairs, n_experts, 3 * n_blocks)
    pairs, rows, ends, blocks = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    block = next((block for block in BLOCKS if n_pairs <= block), BLOCKS[-1])
    _sort_pairs_kernel[(n_experts + 1,)](
        ids,
        pairs,
        rows,
        ends,
        blocks,
        n_pairs,
        n_experts,
        n_blocks,
        block_m,
        BINS=next_power_of_2(n_experts + 2),
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
    )
    return SortedPairs(pairs, rows, ends, blocks.view(3, n_blocks))
