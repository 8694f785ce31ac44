"""Sort the pairs of tokens and experts by expert, and cut them into blocks of one expert.

A few pairs take one kernel. Each is compared with all others, so that no program waits for another one, and nothing has
to be set to 0 before. Of many pairs that would be most of the work: they are counted by tile, one program sums up, and
then each tile is placed.

The grids of the products are bounded by shapes: ``n_blocks`` blocks suffice for any choice of experts, and surplus
blocks have no expert. They are behind the others or between them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2

NO_EXPERT = tl.constexpr(ops.NO_EXPERT)
# What takes one kernel. Not measured: a kernel with a program for each expert, which counted the pairs of all of them,
# took 2.6 us for 64 pairs and 128 experts on an H200, 4 us for 1,024, and 12 us for 80 pairs and 512 experts; three
# kernels by tile take 8 to 10 us.
MAX_FEW_PAIRS = 2048
COMPARED = 32  # pairs or experts of a program
BLOCKS = (32, 128)  # pairs that it compares them with at once; few sizes, for each is compiled
NO_PAIR = 1 << 30  # an expert behind all others
# Pairs of a tile, for so many in all at most, and the pairs that they are compared with at once. Twice as many in a
# tile are twice as slow, for the registers do not hold the comparisons.
TILES = ((1 << 14, 128, 16), (1 << 30, 256, 32))
TILES_AT_ONCE, BLOCKS_AT_ONCE = 8, 128


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
def _compare_pairs_kernel(
    ids_ptr,
    pairs_ptr,
    rows_ptr,
    ends_ptr,
    blocks_ptr,
    n_pairs,
    n_experts,
    n_blocks,
    block_m,  # not a constant: it would multiply the kernels to compile
    NO_PAIR: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each tile of pairs, and one for each tile of experts, those without pairs and no expert included.

    If there are fewer pairs than experts, the block of a pair is its row. Otherwise the blocks of an expert begin at
    its number plus that of the full blocks before it, and are at most two fewer than the next expert leaves room for.
    """
    n_pair_tiles = tl.cdiv(n_pairs, TILE)
    tile = tl.program_id(0)
    if tile < n_pair_tiles:
        pairs, ids = _experts_of(ids_ptr, tile * TILE, n_pairs, n_experts, NO_PAIR, TILE)
    else:
        pairs = tl.zeros([TILE], tl.int32)
        ids = (tile - n_pair_tiles) * TILE + tl.arange(0, TILE)

    first = tl.zeros([TILE], tl.int32)  # row of the expert
    rank = tl.zeros([TILE], tl.int32)  # among its pairs
    count = tl.zeros([TILE], tl.int32)  # of its pairs
    for start in range(0, n_pairs, BLOCK):
        others, other_ids = _experts_of(ids_ptr, start, n_pairs, n_experts, NO_PAIR, BLOCK)
        is_own = other_ids[None, :] == ids[:, None]
        first += tl.sum((other_ids[None, :] < ids[:, None]).to(tl.int32), axis=1)
        rank += tl.sum((is_own & (others[None, :] < pairs[:, None])).to(tl.int32), axis=1)
        count += tl.sum(is_own.to(tl.int32), axis=1)

    if tile < n_pair_tiles:
        row = first + rank
        is_pair = pairs < n_pairs
        tl.store(pairs_ptr + row, pairs, mask=is_pair)
        tl.store(rows_ptr + pairs, row, mask=is_pair)
        is_block = (rank % block_m == 0) & (ids < n_experts)
        ptrs = blocks_ptr + row
        if n_pairs > n_experts:
            ptrs = blocks_ptr + ids + first // block_m + rank // block_m
            is_pair = is_pair & is_block
        tl.store(ptrs, tl.where(is_block, ids, NO_EXPERT), mask=is_pair)
        tl.store(ptrs + n_blocks, row, mask=is_pair)
        tl.store(ptrs + 2 * n_blocks, tl.minimum(row + block_m, first + count), mask=is_pair)
    else:
        tl.store(ends_ptr + ids, first + count, mask=ids < n_experts)
        if n_pairs > n_experts:
            is_expert = ids < n_experts
            used = ids + first // block_m + tl.where(is_expert, (count + block_m - 1) // block_m, 0)
            follows = tl.where(is_expert, ids + 1 + (first + count) // block_m, tl.where(ids == n_experts, n_blocks, 0))
            for unused in range(tl.max(follows - used, axis=0)):
                tl.store(blocks_ptr + used + unused, NO_EXPERT, mask=used + unused < follows)


@triton.jit
def _store_blocks(blocks_ptr, expert, first, end, first_block, n_experts, n_blocks, block_m, BLOCK: tl.constexpr):
    """The blocks of an expert, or behind the last one those without an expert."""
    own_blocks = tl.where(expert < n_experts, (end - first + block_m - 1) // block_m, n_blocks - first_block)
    for start in range(0, own_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        is_block = block < own_blocks
        begin = first + block * block_m
        ptrs = blocks_ptr + first_block + block
        tl.store(ptrs, tl.where(expert < n_experts, expert, NO_EXPERT) + tl.zeros_like(block), mask=is_block)
        tl.store(ptrs + n_blocks, begin, mask=is_block)
        tl.store(ptrs + 2 * n_blocks, tl.minimum(begin + block_m, end), mask=is_block)


@triton.jit(do_not_specialize=["n_pairs"])
def _count_tile_kernel(ids_ptr, counts_ptr, n_pairs, n_experts, BINS: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    _, ids = _experts_of(ids_ptr, tile * TILE, n_pairs, n_experts, BINS - 1, TILE)
    tl.store(counts_ptr + tile * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS))


@triton.jit(do_not_specialize=["n_tiles", "block_m"])
def _sum_tiles_kernel(
    counts_ptr, firsts_ptr, first_blocks_ptr, n_tiles, n_experts, block_m, BINS: tl.constexpr, TILES: tl.constexpr
):
    """Turn the counts of tiles into those of the tiles before. Find the first row and block of each expert."""
    bins = tl.arange(0, BINS)
    totals = tl.zeros([BINS], tl.int32)
    for start in range(0, n_tiles, TILES):
        tiles = start + tl.arange(0, TILES)[:, None]
        ptrs = counts_ptr + tiles * BINS + bins[None, :]
        counts = tl.load(ptrs, mask=tiles < n_tiles, other=0)
        tl.store(ptrs, totals[None, :] + tl.cumsum(counts, axis=0) - counts, mask=tiles < n_tiles)
        totals += tl.sum(counts, axis=0)
    block_counts = tl.where(bins < n_experts, (totals + block_m - 1) // block_m, 0)
    tl.store(firsts_ptr + bins, tl.cumsum(totals, axis=0) - totals)
    tl.store(first_blocks_ptr + bins, tl.cumsum(block_counts, axis=0) - block_counts)


@triton.jit(do_not_specialize=["n_pairs", "n_tiles", "n_blocks", "block_m"])
def _place_pairs_kernel(
    ids_ptr,
    counts_ptr,
    firsts_ptr,
    first_blocks_ptr,
    pairs_ptr,
    rows_ptr,
    blocks_ptr,
    n_pairs,
    n_tiles,
    n_experts,
    n_blocks,
    block_m,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    COMPARED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program for each tile, for each expert's blocks, and one for the blocks without an expert."""
    tile = tl.program_id(0)
    if tile < n_tiles:
        pairs, ids = _experts_of(ids_ptr, tile * TILE, n_pairs, n_experts, BINS - 1, TILE)
        rows = tl.load(firsts_ptr + ids) + tl.load(counts_ptr + tile * BINS + ids)
        for start in range(0, TILE, COMPARED):
            others, other_ids = _experts_of(ids_ptr, tile * TILE + start, n_pairs, n_experts, BINS - 1, COMPARED)
            is_before = (other_ids[None, :] == ids[:, None]) & (others[None, :] < pairs[:, None])
            rows += tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(pairs_ptr + rows, pairs, mask=pairs < n_pairs)
        tl.store(rows_ptr + pairs, rows, mask=pairs < n_pairs)
    else:
        expert = tile - n_tiles
        first, end = tl.load(firsts_ptr + expert), tl.load(firsts_ptr + expert + 1)
        first_block = tl.load(first_blocks_ptr + expert)
        _store_blocks(blocks_ptr, expert, first, end, first_block, n_experts, n_blocks, block_m, BLOCKS)


def max_blocks(n_pairs: int, n_experts: int, block_m: int) -> int:
    """The most blocks that pairs can need: each expert with pairs may have one that is not full."""
    partial = min(n_pairs, n_experts)
    return partial + (n_pairs - partial) // block_m


def sort_pairs(ids: Tensor, n_experts: int, block_m: int) -> SortedPairs:
    """The pairs ``ids`` ``[tokens, top_k]``, contiguous, in blocks of ``block_m`` rows."""
    return (_sort_few if ids.numel() <= MAX_FEW_PAIRS else _sort_many)(ids, n_experts, block_m)


def _sort_few(ids: Tensor, n_experts: int, block_m: int) -> SortedPairs:
    n_pairs = ids.numel()
    n_blocks = n_pairs if n_pairs <= n_experts else n_experts + n_pairs // block_m
    pairs, rows, ends, blocks = _empty(ids, n_pairs, n_pairs, n_experts, 3 * n_blocks)
    _compare_pairs_kernel[(cdiv(n_pairs, COMPARED) + cdiv(n_experts + 1, COMPARED),)](
        ids,
        pairs,
        rows,
        ends,
        blocks,
        n_pairs,
        n_experts,
        n_blocks,
        block_m,
        NO_PAIR=NO_PAIR,
        TILE=COMPARED,
        BLOCK=next((block for block in BLOCKS if n_pairs <= block), BLOCKS[-1]),
    )
    return SortedPairs(pairs, rows, ends, blocks.view(3, n_blocks))


def _sort_many(ids: Tensor, n_experts: int, block_m: int) -> SortedPairs:
    n_pairs, n_blocks = ids.numel(), max_blocks(ids.numel(), n_experts, block_m)
    tile, compared = next(sizes for most, *sizes in TILES if n_pairs <= most)
    bins, n_tiles = next_power_of_2(n_experts + 2), cdiv(n_pairs, tile)
    pairs, rows, blocks = _empty(ids, n_pairs, n_pairs, 3 * n_blocks)
    counts, firsts, first_blocks = _empty(ids, n_tiles * bins, bins, bins)
    _count_tile_kernel[(n_tiles,)](ids, counts, n_pairs, n_experts, BINS=bins, TILE=tile)
    _sum_tiles_kernel[(1,)](
        counts, firsts, first_blocks, n_tiles, n_experts, block_m, BINS=bins, TILES=TILES_AT_ONCE, num_warps=8
    )
    _place_pairs_kernel[(n_tiles + n_experts + 1,)](
        ids,
        counts,
        firsts,
        first_blocks,
        pairs,
        rows,
        blocks,
        n_pairs,
        n_tiles,
        n_experts,
        n_blocks,
        block_m,
        BINS=bins,
        TILE=tile,
        COMPARED=compared,
        BLOCKS=BLOCKS_AT_ONCE,
    )
    return SortedPairs(pairs, rows, firsts[1 : n_experts + 1], blocks.view(3, n_blocks))


def _empty(ids: Tensor, *sizes: int) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes]
