"""Tokens with the highest scores of each query: one kernel stores the scores, another finds the lowest that is kept.

Both have programs for each query. The first one splits the tokens of a query if there are few queries. The second one
searches the threshold among the bits of the scores, exactly, and lists the slots in the order of the tokens. The scores
of all queries of a long step would take gigabytes, so that queries are computed in parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.attention._attention import dot_block
from lightserve.common.triton_kernel.attention._context_tiles import (
    FIRST_TOKEN,
    Q_LEN,
    READY_LEN,
    REQ_IDX,
    START_LOC,
    TILE_FIELDS,
    list_tiles,
)
from lightserve.common.triton_kernel.attention._online_softmax import load_rows
from lightserve.common.triton_kernel.sampling._threshold_search import count_above, keys_of, kth_largest_key

# None of these is measured.
SCORE_BYTES = 256 * 2**20  # of the scores of a part: 409 queries of 163,840 tokens
BLOCK_BYTES = 16 * 2**10  # of keys that a program multiplies at once: 64 keys of 128 numbers in bfloat16
PROGRAMS_PER_SM = 8  # that score
CHUNK = 512  # scores that the search compares at once, as for top-k of logits
SEARCH_WARPS = 8


@triton.jit
def _query(fields):
    """Of a tile: the query's row, how many tokens it sees (0: the tile is empty), and its row of the table."""
    row = tl.load(fields + START_LOC) + tl.load(fields + FIRST_TOKEN)
    seen = tl.load(fields + READY_LEN) + tl.load(fields + FIRST_TOKEN) + 1
    seen = tl.where(tl.load(fields + Q_LEN) > 0, seen, 0)
    return row.to(tl.int64), seen, tl.load(fields + REQ_IDX).to(tl.int64)


@triton.jit(do_not_specialize=["top_k", "max_len"])
def _score_tokens_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    scores_ptr,
    req_to_token_ptr,
    tiles_ptr,
    top_k,
    max_len,
    q_token_stride,
    q_head_stride,
    weights_stride,
    slot_stride,
    req_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Queries that attend to all tokens that they see need no scores."""
    tile = tl.program_id(0).to(tl.int64)
    row, seen, req_idx = _query(tiles_ptr + tile * TILE_FIELDS)
    if seen <= top_k:
        return
    heads, cols = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    q = load_rows(q_ptr + row * q_token_stride, heads * q_head_stride, cols, heads < HEADS, DIM)
    weights = tl.load(weights_ptr + row * weights_stride + heads, mask=heads < HEADS, other=0.0)
    slots_ptr = req_to_token_ptr + req_idx * req_stride
    for start in range(tl.program_id(1) * BLOCK_N, seen, tl.num_programs(1) * BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        is_seen = tokens < seen
        slots = tl.load(slots_ptr + tokens, mask=is_seen, other=0).to(tl.int64)
        keys = load_rows(cache_ptr, slots * slot_stride, cols, is_seen, DIM).to(q.dtype)
        products = tl.dot(q, tl.trans(keys), input_precision="ieee")
        scores = tl.sum(tl.maximum(products, 0.0) * weights[:, None], axis=0)
        tl.store(scores_ptr + tile * max_len + tokens, scores, mask=is_seen)


@triton.jit(do_not_specialize=["top_k", "max_len"])
def _select_tokens_kernel(
    scores_ptr,
    slots_ptr,
    req_to_token_ptr,
    tiles_ptr,
    top_k,
    max_len,
    req_stride,
    CHUNK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    row, seen, req_idx = _query(tiles_ptr + tile * TILE_FIELDS)
    table_ptr, out_ptr = req_to_token_ptr + req_idx * req_stride, slots_ptr + row * top_k
    lanes = tl.arange(0, CHUNK)
    if seen <= top_k:
        for first in range(0, seen, CHUNK):
            tokens = first + lanes
            tl.store(out_ptr + tokens, tl.load(table_ptr + tokens, mask=tokens < seen, other=0), mask=tokens < seen)
        return

    scores_ptr += tile * max_len
    threshold = kth_largest_key(scores_ptr, seen, top_k, CHUNK)
    equal_left = top_k - count_above(scores_ptr, seen, threshold, CHUNK)  # of the tokens at the threshold
    listed = 0
    for first in range(0, seen, CHUNK):
        tokens = first + lanes
        is_token = tokens < seen
        keys = keys_of(tl.load(scores_ptr + tokens, mask=is_token, other=float("-inf")))
        is_equal = (keys == threshold) & is_token
        is_first = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= equal_left)
        is_chosen = ((keys > threshold) & is_token) | is_first
        places = listed + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        slots = tl.load(table_ptr + tokens, mask=is_chosen, other=0)
        tl.store(out_ptr + places, slots, mask=is_chosen)
        listed += tl.sum(is_chosen.to(tl.int32), axis=0)
        equal_left -= tl.sum(is_first.to(tl.int32), axis=0)


@ops.select_tokens.impl("triton")
def select_tokens(q: Tensor, weights: Tensor, key_cache: Tensor, batch: ops.AttnBatch, top_k: int) -> Tensor:
    check_last_contiguous("select_tokens", q=q, weights=weights, key_cache=key_cache, table=batch.req_to_token)
    if q.shape[1:] != (weights.shape[1], key_cache.shape[2]) or key_cache.shape[1] != 1:
        raise ValueError(
            f"select_tokens: heads of q {tuple(q.shape[1:])}, {weights.shape[1]} weights a token and a cache of "
            f"{tuple(key_cache.shape[1:])} a token do not match"
        )
    table, rows = batch.req_to_token, len(q)
    slots = table.new_empty(rows, top_k)
    if rows == 0:
        return slots
    tiles = batch.plans.get("select_tokens")
    if tiles is None:
        tiles = batch.plans["select_tokens"] = list_tiles(batch, rows, 1, 1)
    part_rows = max(min(SCORE_BYTES // (weights.element_size() * table.shape[1]), rows), 1)
    scores = weights.new_empty(part_rows, table.shape[1])
    for first in range(0, rows, part_rows):
        part_tiles = tiles[first : min(first + part_rows, rows)]
        _score(q, weights, key_cache, scores, table, part_tiles, top_k)
        _select_tokens_kernel[(len(part_tiles),)](
            scores,
            slots,
            table,
            part_tiles,
            top_k,
            table.shape[1],
            table.stride(0),
            CHUNK=CHUNK,
            num_warps=SEARCH_WARPS,
        )
    return slots


def _score(
    q: Tensor, weights: Tensor, key_cache: Tensor, scores: Tensor, table: Tensor, tiles: Tensor, top_k: int
) -> None:
    dim = q.shape[2]
    block_n = max(BLOCK_BYTES // (dot_block(dim) * q.element_size()), 16)
    programs = _gpu.active.multiprocessors * PROGRAMS_PER_SM
    splits = min(cdiv(programs, len(tiles)), cdiv(table.shape[1], block_n))
    _score_tokens_kernel[(len(tiles), splits)](
        q,
        weights,
        key_cache,
        scores,
        table,
        tiles,
        top_k,
        table.shape[1],
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        key_cache.stride(0),
        table.stride(0),
        HEADS=q.shape[1],
        DIM=dim,
        BLOCK_H=dot_block(q.shape[1]),
        BLOCK_N=block_n,
        BLOCK_D=dot_block(dim),
        num_warps=4,
    )
