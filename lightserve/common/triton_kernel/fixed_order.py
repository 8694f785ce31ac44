"""Matmul and attention whose result for a row does not depend on what is computed beside it.

Tiles have one size whatever the batch, a program sums along the whole of a row, and keys are folded in from a request's
first token on, in blocks at the same positions for a prompt, a part of one and a decode. Keys that a row may not see
weigh 0, which changes no sum, so neither the row's place in its tile nor the keys after it matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import linear as few_rows
from lightserve.common.triton_kernel._attention import dot_block
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous, tensors_of
from lightserve.common.triton_kernel.context_attention import (
    LOG2_E,
    MAX_PACKED,
    SMALLEST_BLOCK,
    TILE_FIELDS,
    TILINGS,
    fold,
    list_tiles,
    load_rows,
)

BACKEND = ops.fixed_order("triton")
PLAN = "triton.fixed_order"
LINEAR = few_rows.Config(block_n=64, block_bytes=256, num_warps=4, num_stages=4)
LINEAR_ROWS = 64  # of the input a program


@ops.linear.impl(BACKEND)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return few_rows.multiply(rows, weight, bias, LINEAR, LINEAR_ROWS).view(*x.shape[:-1], len(weight))


@triton.jit
def _fixed_order_attention_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    alibi_slopes_ptr,
    req_to_token_ptr,
    tiles_ptr,
    q_token_stride,
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
):
    first_head = (tl.program_id(0) % (HEADS // PACKED)) * PACKED
    fields = tiles_ptr + (tl.program_id(0) // (HEADS // PACKED)) * TILE_FIELDS
    q_len = tl.load(fields + 3)
    if q_len == 0:
        return
    slots_ptr = req_to_token_ptr + tl.load(fields).to(tl.int64) * req_stride
    first_token = tl.load(fields + 2)
    ready_len = tl.load(fields + 4)

    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    block = tl.arange(0, BLOCK_N)
    heads = first_head + rows % PACKED
    q_tokens = first_token + rows // PACKED
    q_positions = ready_len + q_tokens
    is_row = (q_tokens < q_len) & (rows < TOKENS * PACKED)
    q_rows = tl.load(fields + 1).to(tl.int64) + q_tokens
    q = load_rows(q_ptr, q_rows * q_token_stride + heads * DIM, cols, is_row, DIM)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads) * LOG2_E
    scale *= LOG2_E

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_ptr = cache_ptr + (first_head // (HEADS // KV_HEADS)) * DIM
    v_ptr = k_ptr + KV_HEADS * DIM
    end = ready_len + tl.minimum(first_token + TOKENS, q_len)  # no row of this tile sees a later key
    for start in range(0, end, BLOCK_N):
        keys = start + block
        is_key = keys < end
        slots = tl.load(slots_ptr + keys, mask=is_key, other=0).to(tl.int64) * slot_stride
        k = load_rows(k_ptr, slots, cols, is_key, DIM).to(q.dtype)
        v = load_rows(v_ptr, slots, cols, is_key, DIM).to(q.dtype)
        is_seen = keys[None, :] <= q_positions[:, None]
        acc, peak, total = fold(q, k, v, acc, peak, total, keys, q_positions, is_seen, slopes, scale)
    out_ptrs = out_ptr + (q_rows * HEADS + heads)[:, None] * DIM + cols[None, :]
    tl.store(out_ptrs, acc / total[:, None], mask=is_row[:, None] & (cols < DIM)[None, :])


@ops.context_attention.impl(BACKEND)
def context_attention(
    q: Tensor, kv: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, scale: float, alibi_slopes: Tensor | None = None
) -> Tensor:
    return token_attention(q, kv_cache, batch, scale, alibi_slopes)


@ops.token_attention.impl(BACKEND)
def token_attention(
    q: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, scale: float, alibi_slopes: Tensor | None = None
) -> Tensor:
    check_heads_side_by_side("attention", q=q, kv_cache=kv_cache)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not len(q):
        return out
    heads, kv_heads, dim = q.shape[1], kv_cache.shape[1] // 2, q.shape[2]
    block_d = dot_block(dim)
    tiling = TILINGS[q.element_size(), max(block_d, SMALLEST_BLOCK)]
    packed = heads // kv_heads if heads // kv_heads <= MAX_PACKED else 1
    tokens = tiling.rows // packed
    tiles = batch.plans.get(PLAN)
    if tiles is None:
        check_last_contiguous("attention", **tensors_of(batch))
        tiles = batch.plans[PLAN] = list_tiles(batch, len(q), tokens, fewest=1)
    _fixed_order_attention_kernel[(tiles.shape[0] * (heads // packed),)](
        q,
        kv_cache,
        out,
        alibi_slopes,
        batch.req_to_token,
        tiles,
        q.stride(0),
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
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out
