"""The work list of context attention: tiles of query rows, their size, and which tokens of a step each one holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of
from lightserve.common.triton_kernel._gpu import stages_that_fit

REQ_IDX = tl.constexpr(0)  # fields of a tile: the request's row of req_to_token
START_LOC = tl.constexpr(1)  # its first row in q
FIRST_TOKEN = tl.constexpr(2)  # the tile's first one among its new tokens
Q_LEN = tl.constexpr(3)  # its new tokens; 0: the tile is empty
READY_LEN = tl.constexpr(4)  # its tokens before those
TILE_FIELDS = tl.constexpr(8)  # int32 each, the last three unused: a tile is a sector of memory

LISTED_TILES = tl.constexpr(16)  # by one program
LISTED_REQS = tl.constexpr(128)  # that a program compares at once


class Tiling(NamedTuple):
    rows: int  # of queries: tokens times packed heads
    keys: int
    warps: int
    stages: int  # blocks of keys in flight


# By bytes of an element and block of the head dimension. They fit 227 KiB of shared memory, in bfloat16 twice: two
# small programs share a multiprocessor, and a short prompt has more of them. On an H200 with heads of 128, with 64 rows
# of 4 warps and with 128 rows of 8: 1 x 8000 tokens 987 and 953 us, 64 x 1024 1426 and 1570 us, 8 x 512 65 and 74 us,
# 16 x 64 behind 2048 cached 121 and 134 us.
TILINGS = {
    (2, 64): Tiling(64, 64, 4, 3),
    (2, 128): Tiling(64, 64, 4, 3),
    (2, 256): Tiling(64, 32, 4, 2),
    (2, 512): Tiling(32, 16, 4, 2),  # not measured
    (4, 64): Tiling(32, 32, 4, 2),
    (4, 128): Tiling(32, 16, 4, 2),
    (4, 256): Tiling(16, 16, 4, 2),
    (4, 512): Tiling(16, 16, 4, 2),
}
SMALLEST_BLOCK = 64  # of the head dimension in the table
FLOAT32_BYTES = 4
MAX_PACKED = 16  # query heads in a tile; if more share a kv head, each head has its own tiles


def tiling_of(element_bytes: int, block_d: int) -> Tiling:
    """The tiles for a block of the head dimension, in as many stages as the GPU has room for."""
    tiling = TILINGS[element_bytes, max(block_d, SMALLEST_BLOCK)]
    row_bytes = element_bytes * block_d
    tile_bytes, resident_bytes = 2 * tiling.keys * row_bytes, tiling.rows * row_bytes
    if element_bytes == FLOAT32_BYTES:  # Triton then keeps as many tiles as there are stages
        resident_bytes += tile_bytes
    stages = stages_that_fit(tile_bytes, tiling.stages, resident_bytes)
    return tiling if stages == tiling.stages else tiling._replace(stages=stages)


def packed_heads(heads: int, kv_heads: int) -> int:
    """Query heads of a token that share a tile, and so the loads of their keys."""
    return heads // kv_heads if heads // kv_heads <= MAX_PACKED else 1


@triton.jit(
    do_not_specialize=["requests", "n_tiles", "min_new_tokens"],
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
    TOKENS: tl.constexpr,
):
    """List the tiles of the requests that have at least ``min_new_tokens`` new tokens.

    The last tile of a request sees most keys and comes first. Tiles past the end of the list are empty.
    """
    tiles = tl.program_id(0) * LISTED_TILES + tl.arange(0, LISTED_TILES)
    owners = tl.zeros([LISTED_TILES], tl.int32)  # the request of each tile: a count of those before it
    first_tiles = tl.zeros([LISTED_TILES], tl.int32)  # of each tile's request
    listed = 0
    for first in range(0, requests, LISTED_REQS):
        others = first + tl.arange(0, LISTED_REQS)
        is_request = others < requests
        seq_lens = tl.load(b_seq_len_ptr + others, mask=is_request, other=0)
        ready_lens = tl.load(b_ready_cache_len_ptr + others, mask=is_request, other=0)
        q_lens = seq_lens - ready_lens
        counts = tl.where(q_lens >= min_new_tokens, tl.cdiv(q_lens, TOKENS), 0)
        ends = listed + tl.cumsum(counts, axis=0)
        is_before = is_request[None, :] & (ends[None, :] <= tiles[:, None])
        owners += tl.sum(is_before.to(tl.int32), axis=1)
        first_tiles = tl.maximum(first_tiles, tl.max(tl.where(is_before, ends[None, :], 0), axis=1))
        listed += tl.sum(counts, axis=0)

    is_filled = owners < requests
    ready_lens = tl.load(b_ready_cache_len_ptr + owners, mask=is_filled, other=0)
    q_lens = tl.load(b_seq_len_ptr + owners, mask=is_filled, other=0) - ready_lens
    first_tokens = tl.where(is_filled, (tl.cdiv(q_lens, TOKENS) - 1 - (tiles - first_tiles)) * TOKENS, 0)
    is_tile = tiles < n_tiles
    fields = tiles_ptr + tiles * TILE_FIELDS
    tl.store(fields + REQ_IDX, tl.load(b_req_idx_ptr + owners, mask=is_filled, other=0), mask=is_tile)
    tl.store(fields + START_LOC, tl.load(b_start_loc_ptr + owners, mask=is_filled, other=0), mask=is_tile)
    tl.store(fields + FIRST_TOKEN, first_tokens, mask=is_tile)
    tl.store(fields + Q_LEN, q_lens, mask=is_tile)
    tl.store(fields + READY_LEN, ready_lens, mask=is_tile)


def list_tiles(batch: ops.AttnBatch, rows: int, tokens: int, min_new_tokens: int) -> Tensor:
    """``[tiles, TILE_FIELDS]`` of requests with at least ``min_new_tokens`` new tokens; the surplus is empty."""
    check_last_contiguous("context_attention", **tensors_of(batch))
    requests = batch.b_req_idx.shape[0]
    count = rows // tokens + min(requests, rows // min_new_tokens)
    tiles = batch.b_req_idx.new_empty((count, TILE_FIELDS.value), dtype=torch.int32)
    _list_tiles_kernel[(cdiv(count, LISTED_TILES.value),)](
        tiles,
        batch.b_req_idx,
        batch.b_start_loc,
        batch.b_seq_len,
        batch.b_ready_cache_len,
        requests,
        count,
        min_new_tokens,
        TOKENS=tokens,
    )
    return tiles
