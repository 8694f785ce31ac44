"""Attention of prompts: one program a tile of a request's tokens, with all query heads that share a kv head.

A program folds in the cached prefix, gathered slot by slot, then the step's own tokens, which lie side by side in
``kv``, up to its diagonal. The tiles of a step are listed once, on the device, and the grid is bounded by shapes
alone: nothing waits for the host, and a CUDA graph may hold the launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.common import ops
from lightserve.common.triton_kernel import token_attention
from lightserve.common.triton_kernel._attention import dot_block
from lightserve.common.triton_kernel._blocks import cdiv
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous, tensors_of

LOG2_E = tl.constexpr(1.4426950408889634)  # scores are in base 2: exp2 is one instruction
MAX_PACKED = 16  # query heads a tile; of more that share a kv head, each has its own tiles
PLAN = "triton.context_attention"
COPY_ALIGNMENT = 16  # bytes, of what the copy engine reads: its address and its rows

TILE_FIELDS = tl.constexpr(8)  # request's row of req_to_token, first row in q, first token, tokens, ready, unused
LISTED_TILES = tl.constexpr(16)  # a program of the listing
LISTED_REQS = tl.constexpr(128)  # looked at together by the listing


class Tiling(NamedTuple):
    rows: int  # of queries: tokens times packed heads
    keys: int
    warps: int
    stages: int  # blocks of keys on their way


# By bytes of an element and block of the head dimension; what fits 227 KiB of shared memory, in bfloat16 twice: two
# small programs share a multiprocessor, and a short prompt has more of them. On an H200 with heads of 128, as 64 rows
# of 4 warps and as 128 rows of 8: 1 x 8000 tokens 987 and 953 us, 64 x 1024 1426 and 1570 us, 8 x 512 65 and 74 us,
# 16 x 64 behind 2048 cached 121 and 134 us.
TILINGS = {
    (2, 64): Tiling(64, 64, 4, 3),
    (2, 128): Tiling(64, 64, 4, 3),
    (2, 256): Tiling(64, 32, 4, 2),
    (4, 64): Tiling(32, 32, 4, 2),
    (4, 128): Tiling(32, 16, 4, 2),
    (4, 256): Tiling(16, 16, 4, 2),
}
SMALLEST_BLOCK = 64  # of the head dimension that has a row above


@triton.jit(
    do_not_specialize=["requests", "n_tiles", "fewest"],
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
    fewest,
    TOKENS: tl.constexpr,
):
    """Which tokens each tile holds, of the requests with ``fewest`` new tokens or more.

    A request's last tile, which sees most keys, comes first; the surplus is empty.
    """
    tiles = tl.program_id(0) * LISTED_TILES + tl.arange(0, LISTED_TILES)
    owners = tl.zeros([LISTED_TILES], tl.int32)  # the request of each tile: those before it, counted
    first_tiles = tl.zeros([LISTED_TILES], tl.int32)  # of each tile's request
    listed = 0
    for first in range(0, requests, LISTED_REQS):
        others = first + tl.arange(0, LISTED_REQS)
        is_request = others < requests
        seq_lens = tl.load(b_seq_len_ptr + others, mask=is_request, other=0)
        ready_lens = tl.load(b_ready_cache_len_ptr + others, mask=is_request, other=0)
        q_lens = seq_lens - ready_lens
        counts = tl.where(q_lens >= fewest, tl.cdiv(q_lens, TOKENS), 0)
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
    tl.store(fields, tl.load(b_req_idx_ptr + owners, mask=is_filled, other=0), mask=is_tile)
    tl.store(fields + 1, tl.load(b_start_loc_ptr + owners, mask=is_filled, other=0), mask=is_tile)
    tl.store(fields + 2, first_tokens, mask=is_tile)
    tl.store(fields + 3, q_lens, mask=is_tile)
    tl.store(fields + 4, ready_lens, mask=is_tile)


@triton.jit
def _load_rows(ptr, offsets, cols, is_row, DIM: tl.constexpr):
    """``[rows, dim]`` padded with 0. A masked row is 0, not what lies there: 0 * NaN is NaN."""
    ptrs = ptr + offsets[:, None] + cols[None, :]
    mask = None
    if is_row is not None:
        mask = is_row[:, None]
    if cols.shape[0] > DIM:
        is_col = (cols < DIM)[None, :]
        mask = is_col if mask is None else mask & is_col
    return tl.load(ptrs) if mask is None else tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _fold(q, k, v, acc, peak, total, keys, q_positions, is_seen, slopes, scale):
    """Fold a block of keys into the running softmax of each row, whose scores are in base 2.

    ``is_seen`` None: every row sees every key; otherwise every row must see one, of this block or of those before.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if slopes is not None:
        scores = scores * scale + slopes[:, None] * (keys[None, :] - q_positions[:, None])
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    highest = tl.max(scores, axis=1)
    if slopes is None:  # the scale costs nothing inside the multiply-add of the exponent
        new_peak = tl.maximum(peak, highest * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
    else:
        new_peak = tl.maximum(peak, highest)
        weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def _fold_prefix(
    q,
    acc,
    peak,
    total,
    k_ptr,
    v_ptr,
    slots_ptr,
    slot_stride,
    ready_len,
    q_positions,
    slopes,
    scale,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tokens that were in the cache before the step: every row sees them all."""
    cols = tl.arange(0, q.shape[1])
    block = tl.arange(0, BLOCK_N)
    whole = ready_len // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        keys = start + block
        slots = tl.load(slots_ptr + keys).to(tl.int64) * slot_stride
        k = _load_rows(k_ptr, slots, cols, None, DIM).to(q.dtype)
        v = _load_rows(v_ptr, slots, cols, None, DIM).to(q.dtype)
        acc, peak, total = _fold(q, k, v, acc, peak, total, keys, q_positions, None, slopes, scale)
    if whole < ready_len:
        keys = whole + block
        is_key = keys < ready_len
        slots = tl.load(slots_ptr + keys, mask=is_key, other=0).to(tl.int64) * slot_stride
        k = _load_rows(k_ptr, slots, cols, is_key, DIM).to(q.dtype)
        v = _load_rows(v_ptr, slots, cols, is_key, DIM).to(q.dtype)
        acc, peak, total = _fold(q, k, v, acc, peak, total, keys, q_positions, is_key[None, :], slopes, scale)
    return acc, peak, total


@triton.jit
def _fold_in_order(
    q,
    acc,
    peak,
    total,
    k_ptr,
    v_ptr,
    slots_ptr,
    slot_stride,
    end,
    q_positions,
    slopes,
    scale,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """All tokens from the cache, in blocks that begin at the same positions whatever the step computes.

    A key that a row may not see weighs 0 and changes no sum, so neither a row's place in its tile nor what follows it
    matters to a bit of the row.
    """
    cols = tl.arange(0, q.shape[1])
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < end
        slots = tl.load(slots_ptr + keys, mask=is_key, other=0).to(tl.int64) * slot_stride
        k = _load_rows(k_ptr, slots, cols, is_key, DIM).to(q.dtype)
        v = _load_rows(v_ptr, slots, cols, is_key, DIM).to(q.dtype)
        is_seen = keys[None, :] <= q_positions[:, None]
        acc, peak, total = _fold(q, k, v, acc, peak, total, keys, q_positions, is_seen, slopes, scale)
    return acc, peak, total


@triton.jit
def _load_block(
    kv_desc, kv_ptr, token_stride, row, col, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``BLOCK_N`` rows of one head of the step's own tokens, by the copy engine where there is a descriptor."""
    if kv_desc is not None:
        return kv_desc.load([row, col])
    offsets = tl.arange(0, BLOCK_N) * token_stride  # inside a block: far from 2^31
    return _load_rows(kv_ptr + row.to(tl.int64) * token_stride + col, offsets, tl.arange(0, BLOCK_D), None, DIM)


@triton.jit
def _fold_own(
    q,
    acc,
    peak,
    total,
    kv_desc,
    kv_ptr,
    token_stride,
    start_loc,
    k_col,
    v_col,
    first_token,
    q_len,
    end,
    q_tokens,
    slopes,
    scale,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The step's own tokens of the request up to ``end``; only the blocks from ``first_token`` on need a mask.

    A block that reaches past the request is loaded under a mask too: the rows of others may hold NaN.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    block = tl.arange(0, BLOCK_N)
    diagonal = first_token // BLOCK_N * BLOCK_N
    whole = q_len // BLOCK_N * BLOCK_N
    for start in range(0, diagonal, BLOCK_N):
        k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
        v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
        acc, peak, total = _fold(q, k, v, acc, peak, total, start + block, q_tokens, None, slopes, scale)
    for start in range(diagonal, tl.minimum(end, whole), BLOCK_N):
        keys = start + block
        k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
        v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
        is_seen = keys[None, :] <= q_tokens[:, None]
        acc, peak, total = _fold(q, k, v, acc, peak, total, keys, q_tokens, is_seen, slopes, scale)
    if whole < end:
        keys = whole + block
        rows_ptr = kv_ptr + (start_loc + whole).to(tl.int64) * token_stride
        k = _load_rows(rows_ptr + k_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        v = _load_rows(rows_ptr + v_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        is_seen = keys[None, :] <= q_tokens[:, None]
        acc, peak, total = _fold(q, k, v, acc, peak, total, keys, q_tokens, is_seen, slopes, scale)
    return acc, peak, total


@triton.jit
def _context_attention_kernel(
    q_ptr,
    kv_desc,
    kv_ptr,
    cache_ptr,
    out_ptr,
    alibi_slopes_ptr,
    req_to_token_ptr,
    tiles_ptr,
    q_token_stride,
    kv_token_stride,
    slot_stride,
    req_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIXED_ORDER: tl.constexpr,
):
    first_head = (tl.program_id(0) % (HEADS // PACKED)) * PACKED
    fields = tiles_ptr + (tl.program_id(0) // (HEADS // PACKED)) * TILE_FIELDS
    q_len = tl.load(fields + 3)
    if q_len == 0:
        return
    req_idx = tl.load(fields).to(tl.int64)
    start_loc = tl.load(fields + 1)
    first_token = tl.load(fields + 2)
    ready_len = tl.load(fields + 4)

    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    heads = first_head + rows % PACKED
    q_tokens = first_token + rows // PACKED
    is_row = (q_tokens < q_len) & (rows < TOKENS * PACKED)
    q_rows = start_loc.to(tl.int64) + q_tokens
    q = _load_rows(q_ptr, q_rows * q_token_stride + heads * DIM, cols, is_row, DIM)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads) * LOG2_E
    scale *= LOG2_E

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_head = (first_head // (HEADS // KV_HEADS)) * DIM
    v_head = k_head + KV_HEADS * DIM
    slots_ptr = req_to_token_ptr + req_idx * req_stride
    q_positions = ready_len + q_tokens
    end = tl.minimum(first_token + TOKENS, q_len)  # no row of this tile sees a later key
    if FIXED_ORDER:
        acc, peak, total = _fold_in_order(
            q,
            acc,
            peak,
            total,
            cache_ptr + k_head,
            cache_ptr + v_head,
            slots_ptr,
            slot_stride,
            ready_len + end,
            q_positions,
            slopes,
            scale,
            DIM,
            BLOCK_N,
        )
    else:
        acc, peak, total = _fold_prefix(
            q,
            acc,
            peak,
            total,
            cache_ptr + k_head,
            cache_ptr + v_head,
            slots_ptr,
            slot_stride,
            ready_len,
            q_positions,
            slopes,
            scale,
            DIM,
            BLOCK_N,
        )
        acc, peak, total = _fold_own(
            q,
            acc,
            peak,
            total,
            kv_desc,
            kv_ptr,
            kv_token_stride,
            start_loc,
            k_head,
            v_head,
            first_token,
            q_len,
            end,
            q_tokens,
            slopes,
            scale,
            DIM,
            BLOCK_N,
        )
    out_ptrs = out_ptr + (q_rows * HEADS + heads)[:, None] * DIM + cols[None, :]
    tl.store(out_ptrs, acc / total[:, None], mask=is_row[:, None] & (cols < DIM)[None, :])


@ops.context_attention.impl("triton")
def context_attention(
    q: Tensor, kv: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, scale: float, alibi_slopes: Tensor | None = None
) -> Tensor:
    _check(q, kv, kv_cache)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if batch.has_decodes:
        token_attention.launch(q, kv_cache, batch, scale, alibi_slopes, out)
    _launch(q, kv, kv_cache, batch, scale, alibi_slopes, out)
    return out


def attend_in_order(
    q: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, scale: float, alibi_slopes: Tensor | None
) -> Tensor:
    """Attention of prompts and decodes alike, of which no bit depends on what else the step computes."""
    _check(q, kv_cache, kv_cache)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, None, kv_cache, batch, scale, alibi_slopes, out)
    return out


def _launch(
    q: Tensor,
    kv: Tensor | None,
    kv_cache: Tensor,
    batch: ops.AttnBatch,
    scale: float,
    slopes: Tensor | None,
    out: Tensor,
) -> None:
    """Without ``kv`` all is read from the cache, in a fixed order."""
    if not len(q):
        return
    heads, kv_heads, dim = q.shape[1], kv_cache.shape[1] // 2, q.shape[2]
    block_d = dot_block(dim)
    tiling = TILINGS[q.element_size(), max(block_d, SMALLEST_BLOCK)]
    packed = heads // kv_heads if heads // kv_heads <= MAX_PACKED else 1
    tokens = tiling.rows // packed
    tiles = batch.plans.get(PLAN)
    if tiles is None:
        fewest = 2 if batch.has_decodes and kv is not None else 1
        tiles = batch.plans[PLAN] = _list_tiles(batch, len(q), tokens, fewest)
    _context_attention_kernel[(tiles.shape[0] * (heads // packed),)](
        q,
        None if kv is None else _descriptor(kv, tiling.keys, block_d),
        kv,
        kv_cache,
        out,
        slopes,
        batch.req_to_token,
        tiles,
        q.stride(0),
        0 if kv is None else kv.stride(0),
        kv_cache.stride(0),
        batch.req_to_token.stride(0),
        scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PACKED=packed,
        TOKENS=tokens,
        DIM=dim,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.keys,
        BLOCK_D=block_d,
        FIXED_ORDER=kv is None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def _descriptor(kv: Tensor, keys: int, block_d: int) -> TensorDescriptor | None:
    """For the copy engine: ``kv`` as rows, read ``keys`` of a head at a time; None where its rules forbid that."""
    rows, heads, dim = kv.shape
    stride = kv.stride(0)
    if dim != block_d or stride * kv.element_size() % COPY_ALIGNMENT or kv.data_ptr() % COPY_ALIGNMENT:
        return None
    return TensorDescriptor(kv, [rows, heads * dim], [stride, 1], [keys, dim])


def _list_tiles(batch: ops.AttnBatch, rows: int, tokens: int, fewest: int) -> Tensor:
    """``[tiles, TILE_FIELDS]`` of requests with ``fewest`` new tokens or more: as many as could be, some empty."""
    check_last_contiguous("context_attention", **tensors_of(batch))
    requests = batch.b_req_idx.shape[0]
    count = rows // tokens + min(requests, rows // fewest)
    tiles = batch.b_req_idx.new_empty((count, TILE_FIELDS.value), dtype=torch.int32)
    _list_tiles_kernel[(cdiv(count, LISTED_TILES.value),)](
        tiles,
        batch.b_req_idx,
        batch.b_start_loc,
        batch.b_seq_len,
        batch.b_ready_cache_len,
        requests,
        count,
        fewest,
        TOKENS=tokens,
    )
    return tiles


def _check(q: Tensor, kv: Tensor, kv_cache: Tensor) -> None:
    check_heads_side_by_side("context_attention", q=q, kv=kv, kv_cache=kv_cache)
    if kv.shape[1:] != kv_cache.shape[1:] or q.shape[2] != kv.shape[2] or 2 * q.shape[1] % kv.shape[1]:
        raise ValueError(
            f"context_attention: heads of q {tuple(q.shape[1:])}, of kv {tuple(kv.shape[1:])} and of the cache "
            f"{tuple(kv_cache.shape[1:])} do not go together"
        )
