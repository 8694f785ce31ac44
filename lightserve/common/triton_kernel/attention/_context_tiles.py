"""The work list of context attention: tiles of query rows, their size, and which tokens of a step each one holds.

If a step has few tiles, their keys are split, so that all multiprocessors stay busy: 700 tokens behind 5,000 cached
ones are 176 programs on 132 multiprocessors of an H200, and 44 of them would run alone for as long as those before
them. The list is made on the device, from lengths that the host does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of
from lightserve.common.triton_kernel._gpu import stages_that_fit

REQ_IDX = tl.constexpr(0)  # fields of a tile: the request's row of req_to_token
START_LOC = tl.constexpr(1)  # its first row in q
FIRST_TOKEN = tl.constexpr(2)  # the tile's first one among its new tokens
Q_LEN = tl.constexpr(3)  # its new tokens; 0: the tile is empty
READY_LEN = tl.constexpr(4)  # its tokens before those
SPLIT = tl.constexpr(5)  # which part of its keys
SPLITS = tl.constexpr(6)  # how many parts they have
FIRST_PART = tl.constexpr(7)  # where the partial result of the first part is, if there are several
TILE_FIELDS = tl.constexpr(8)  # int32 each: a tile is a sector of memory

LISTED_TILES = tl.constexpr(16)  # by one program
LISTED_REQS = tl.constexpr(128)  # that a program compares at once
TRIED_LENS = tl.constexpr(32)  # of splits: from twice a program's share of all keys down to less than a quarter of it
MIN_SPLIT = tl.constexpr(512)  # keys; a shorter split costs more to merge than to compute
# Keys that are computed in the time in which a partial result is stored, and in which one is merged. On an H200 700
# tokens behind 2,000 take 90 us, split in two 93 and in three 105; behind 5,000 193, 167 and 173.
STORE_KEYS = tl.constexpr(224)
MERGE_KEYS = tl.constexpr(128)
MAX_KEYS = 2**30  # more than a request has
UNSPLIT = tl.constexpr(MAX_KEYS)


class Tiling(NamedTuple):
    rows: int  # of queries: tokens times packed heads
    keys: int
    warps: int
    stages: int  # blocks of keys in flight
    programs: int = 1  # that a multiprocessor of an H200 runs side by side


# By bytes of an element and block of the head dimension. They fit 227 KiB of shared memory, in bfloat16 twice: two
# small programs share a multiprocessor, and a short prompt has more of them.
TILINGS = {
    (2, 64): Tiling(64, 64, 4, 3, 2),
    (2, 128): Tiling(64, 64, 4, 3, 2),
    (2, 256): Tiling(64, 32, 4, 2),
    (2, 512): Tiling(32, 16, 4, 2),  # not measured
    (4, 64): Tiling(32, 32, 4, 2),
    (4, 128): Tiling(32, 16, 4, 2),
    (4, 256): Tiling(16, 16, 4, 2),
    (4, 512): Tiling(16, 16, 4, 2),
}
# For requests that fill them: each gathered key serves twice as many queries. On an H200 with heads of 128, narrow and
# wide: 8192 tokens behind 92000 cached ones 32.2 and 28.4 ms, 1 x 8000 1081 and 999 us, 64 x 1024 1685 and 1680 us, 8 x
# 512 76 and 83 us, 16 x 64 behind 2048 92 and 85 us; 256 x 16 behind 1000 would need twice as many programs.
WIDE_TILINGS = {
    (2, 64): Tiling(128, 64, 8, 3),
    (2, 128): Tiling(128, 64, 8, 3),
}
SMALLEST_BLOCK = 64  # of the head dimension in the table
FLOAT32_BYTES = 4
MAX_PACKED = 16  # query heads in a tile; if more share a kv head, each head has its own tiles


def tiling_of(element_bytes: int, block_d: int, rows_per_request: int = 0) -> Tiling:
    """The tiles for a block of the head dimension, in as many stages as the GPU has room for.

    ``rows_per_request``: query rows of one kv head that an average request has.
    """
    key = element_bytes, max(block_d, SMALLEST_BLOCK)
    tiling = TILINGS[key]
    wide = WIDE_TILINGS.get(key)
    if wide is not None and rows_per_request >= wide.rows:
        tiling = wide
    row_bytes = element_bytes * block_d
    tile_bytes, resident_bytes = 2 * tiling.keys * row_bytes, tiling.rows * row_bytes
    if element_bytes == FLOAT32_BYTES:  # Triton then keeps as many tiles as there are stages
        resident_bytes += tile_bytes
    stages = stages_that_fit(tile_bytes, tiling.stages, resident_bytes)
    return tiling if stages == tiling.stages else tiling._replace(stages=stages)


def packed_heads(heads: int, kv_heads: int) -> int:
    """Query heads of a token that share a tile, and so the loads of their keys."""
    return heads // kv_heads if heads // kv_heads <= MAX_PACKED else 1


@triton.jit
def _keys_and_tiles(reqs, is_request, b_seq_len_ptr, b_ready_cache_len_ptr, min_new_tokens, window, TOKENS):
    """Of requests: the keys that a tile sees at most, and the number of tiles."""
    seq_lens = tl.load(b_seq_len_ptr + reqs, mask=is_request, other=0)
    q_lens = seq_lens - tl.load(b_ready_cache_len_ptr + reqs, mask=is_request, other=0)
    tiles = tl.where(q_lens >= min_new_tokens, tl.cdiv(q_lens, TOKENS), 0)
    return tl.minimum(seq_lens, window), tiles


@triton.jit
def _split_len(
    b_seq_len_ptr, b_ready_cache_len_ptr, requests, min_new_tokens, window, programs, groups, TOKENS: tl.constexpr
):
    """The most keys of a split. ``programs`` run at once, ``groups`` of them for each split.

    Of the lengths that it tries it takes the one with which the step ends first.
    """
    work = tl.full([], 0, tl.int64)  # keys times tiles
    for first in range(0, requests, LISTED_REQS):
        reqs = first + tl.arange(0, LISTED_REQS)
        keys, tiles = _keys_and_tiles(
            reqs, reqs < requests, b_seq_len_ptr, b_ready_cache_len_ptr, min_new_tokens, window, TOKENS
        )
        work += tl.sum(keys.to(tl.int64) * tiles, axis=0)
    order = tl.arange(0, TRIED_LENS)
    tried = tl.cdiv(8 * work * groups, programs * (4 + order))
    tried = tl.minimum(tl.maximum(tried, MIN_SPLIT), UNSPLIT).to(tl.int32)  # to divide by int64 takes long to compile
    counts = tl.zeros([TRIED_LENS], tl.int32)  # of splits
    longest = tl.zeros([TRIED_LENS], tl.int32)  # of them, and what it takes to merge them
    for first in range(0, requests, LISTED_REQS):
        reqs = first + tl.arange(0, LISTED_REQS)
        keys, tiles = _keys_and_tiles(
            reqs, reqs < requests, b_seq_len_ptr, b_ready_cache_len_ptr, min_new_tokens, window, TOKENS
        )
        splits = _splits(keys[None, :], tried[:, None])
        counts += tl.sum(splits * tiles[None, :], axis=1)
        merging = tl.where(splits > 1, STORE_KEYS + splits * MERGE_KEYS, 0)
        lens = tl.where(tiles[None, :] > 0, keys[None, :] // splits + merging, 0)
        longest = tl.maximum(longest, tl.max(lens, axis=1))
    best = tl.argmin(tl.cdiv(counts * groups, programs).to(tl.int64) * longest, axis=0)
    return tl.sum(tl.where(order == best, tried, 0), axis=0)


@triton.jit
def _splits(keys, split_len):
    return tl.maximum(tl.cdiv(keys, split_len), 1)


@triton.jit
def _owners_of(
    tiles, b_seq_len_ptr, b_ready_cache_len_ptr, requests, min_new_tokens, window, split_len, TOKENS: tl.constexpr
):
    """Of each tile: its request, the request's first tile, and where the partial results of the request begin."""
    owners = tl.zeros([LISTED_TILES], tl.int32)  # a count of the requests before
    first_tiles = tl.zeros([LISTED_TILES], tl.int32)
    first_parts = tl.zeros([LISTED_TILES], tl.int32)
    listed, listed_parts = 0, 0
    for first in range(0, requests, LISTED_REQS):
        others = first + tl.arange(0, LISTED_REQS)
        is_request = others < requests
        keys, counts = _keys_and_tiles(
            others, is_request, b_seq_len_ptr, b_ready_cache_len_ptr, min_new_tokens, window, TOKENS
        )
        counts *= _splits(keys, split_len)
        parts = tl.where(keys > split_len, counts, 0)
        ends, part_ends = listed + tl.cumsum(counts, axis=0), listed_parts + tl.cumsum(parts, axis=0)
        is_before = is_request[None, :] & (ends[None, :] <= tiles[:, None])
        owners += tl.sum(is_before.to(tl.int32), axis=1)
        first_tiles = tl.maximum(first_tiles, tl.max(tl.where(is_before, ends[None, :], 0), axis=1))
        first_parts = tl.maximum(first_parts, tl.max(tl.where(is_before, part_ends[None, :], 0), axis=1))
        listed += tl.sum(counts, axis=0)
        listed_parts += tl.sum(parts, axis=0)
    return owners, first_tiles, first_parts


@triton.jit(
    do_not_specialize=["requests", "n_tiles", "min_new_tokens", "window", "programs", "groups"],
    do_not_specialize_on_alignment=["b_req_idx_ptr", "b_start_loc_ptr", "b_seq_len_ptr", "b_ready_cache_len_ptr"],
)
def _list_tiles_kernel(
    tiles_ptr,
    b_req_idx_ptr,
    b_start_loc_ptr,
    b_seq_len_ptr,
    b_ready_cache_len_ptr,
    requests,
    n_tiles,
    min_new_tokens,
    window,
    programs,
    groups,
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """List the tiles of the requests that have at least ``min_new_tokens`` new tokens, each once for each split.

    The last tile of a request sees most keys and comes first. Tiles past the end of the list are empty.
    """
    tiles = tl.program_id(0) * LISTED_TILES + tl.arange(0, LISTED_TILES)
    split_len = UNSPLIT
    if IS_SPLIT:
        split_len = _split_len(
            b_seq_len_ptr, b_ready_cache_len_ptr, requests, min_new_tokens, window, programs, groups, TOKENS
        )
    owners, first_tiles, first_parts = _owners_of(
        tiles, b_seq_len_ptr, b_ready_cache_len_ptr, requests, min_new_tokens, window, split_len, TOKENS
    )
    is_filled = owners < requests
    seq_lens = tl.load(b_seq_len_ptr + owners, mask=is_filled, other=0)
    ready_lens = tl.load(b_ready_cache_len_ptr + owners, mask=is_filled, other=0)
    q_lens = seq_lens - ready_lens
    splits = _splits(tl.minimum(seq_lens, window), split_len)
    places, split = (tiles - first_tiles) // splits, (tiles - first_tiles) % splits
    first_tokens = tl.where(is_filled, (tl.cdiv(q_lens, TOKENS) - 1 - places) * TOKENS, 0)
    is_tile = tiles < n_tiles
    fields = tiles_ptr + tiles * TILE_FIELDS
    tl.store(fields + REQ_IDX, tl.load(b_req_idx_ptr + owners, mask=is_filled, other=0), mask=is_tile)
    tl.store(fields + START_LOC, tl.load(b_start_loc_ptr + owners, mask=is_filled, other=0), mask=is_tile)
    tl.store(fields + FIRST_TOKEN, first_tokens, mask=is_tile)
    tl.store(fields + Q_LEN, q_lens, mask=is_tile)
    tl.store(fields + READY_LEN, ready_lens, mask=is_tile)
    tl.store(fields + SPLIT, split, mask=is_tile)
    tl.store(fields + SPLITS, splits, mask=is_tile)
    tl.store(fields + FIRST_PART, first_parts + places * splits, mask=is_tile)


def list_tiles(batch: ops.AttnBatch, rows: int, tokens: int, min_new_tokens: int) -> Tensor:
    """``[tiles, TILE_FIELDS]`` of requests with at least ``min_new_tokens`` new tokens; the surplus is empty.

    The keys of a tile are not split.
    """
    return _list(batch, _max_tiles(batch, rows, tokens, min_new_tokens), tokens, min_new_tokens, None, 0, 1)


@dataclass(frozen=True, slots=True)
class SplitTiles:
    """What all layers of a step share that have one shape: the tiles, and room for partial results.

    The shortest splits that are tried bound the number of extra tiles. A tile has at most twice as many splits as it
    has extra ones.
    """

    tiles: Tensor  # [tiles, TILE_FIELDS] int32
    # None: no keys are split
    sums: Tensor | None = None  # [max parts, groups, rows, block_d] float32: weighted sums of values
    peaks: Tensor | None = None  # [max parts, groups, rows] float32: highest scores
    totals: Tensor | None = None  # [max parts, groups, rows] float32: sums of weights
    done_counts: Tensor | None = (
        None  # [max parts, groups] int32: finished splits, at a tile's first; 0 between launches
    )


def list_split_tiles(
    batch: ops.AttnBatch,
    rows: int,
    tiling: Tiling,
    packed: int,
    groups: int,
    block_d: int,
    min_new_tokens: int,
    window: int | None,
) -> SplitTiles:
    """Like ``list_tiles``, with the keys of tiles split where that ends sooner. ``groups``: programs of a tile."""
    tokens = tiling.rows // packed
    programs = _gpu.active.multiprocessors * _gpu.programs_per_multiprocessor(tiling.programs)
    extra = cdiv((3 + TRIED_LENS.value) * programs, 8 * groups)
    count = _max_tiles(batch, rows, tokens, min_new_tokens) + extra
    seen = None if window is None else window + tokens  # by the rows of a tile
    tiles = _list(batch, count, tokens, min_new_tokens, seen, programs, groups)
    parts = (2 * extra, groups)
    return SplitTiles(
        tiles,
        sums=tiles.new_empty((*parts, tiling.rows, block_d), dtype=torch.float32),
        peaks=tiles.new_empty((*parts, tiling.rows), dtype=torch.float32),
        totals=tiles.new_empty((*parts, tiling.rows), dtype=torch.float32),
        done_counts=tiles.new_zeros(parts),
    )


def _max_tiles(batch: ops.AttnBatch, rows: int, tokens: int, min_new_tokens: int) -> int:
    return rows // tokens + min(batch.b_req_idx.shape[0], rows // min_new_tokens)


def _list(
    batch: ops.AttnBatch,
    count: int,
    tokens: int,
    min_new_tokens: int,
    seen: int | None,
    programs: int,
    groups: int,
) -> Tensor:
    """``seen``: keys that a tile sees at most; ``programs``: that run at once, 0 if keys are not split."""
    check_last_contiguous("context_attention", **tensors_of(batch))
    tiles = batch.b_req_idx.new_empty((count, TILE_FIELDS.value), dtype=torch.int32)
    _list_tiles_kernel[(cdiv(count, LISTED_TILES.value),)](
        tiles,
        batch.b_req_idx,
        batch.b_start_loc,
        batch.b_seq_len,
        batch.b_ready_cache_len,
        batch.b_req_idx.shape[0],
        count,
        min_new_tokens,
        MAX_KEYS if seen is None else seen,
        programs,
        groups,
        TOKENS=tokens,
        IS_SPLIT=programs > 0,
    )
    return tiles
