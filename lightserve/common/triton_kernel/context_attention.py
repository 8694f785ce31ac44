"""Attention of prompts: one program a block of a request's query rows and a head, over the keys those rows see."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._attention import attend, check_attention, dot_block, keys_a_tile


@triton.jit
def _context_attention_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    alibi_slopes_ptr,
    req_to_token_ptr,
    b_req_idx_ptr,
    b_start_loc_ptr,
    b_seq_len_ptr,
    b_ready_cache_len_ptr,
    q_token_stride,
    q_head_stride,
    slot_stride,
    kv_head_stride,
    out_token_stride,
    out_head_stride,
    req_stride,
    kv_heads,
    group,
    dim,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    request = tl.program_id(2)
    seq_len = tl.load(b_seq_len_ptr + request)
    ready_len = tl.load(b_ready_cache_len_ptr + request)
    q_len = seq_len - ready_len
    if first_row >= q_len:
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows[:, None] < q_len) & (cols[None, :] < dim)
    tokens = (tl.load(b_start_loc_ptr + request) + rows).to(tl.int64)
    q = tl.load(q_ptr + tokens[:, None] * q_token_stride + head * q_head_stride + cols, mask=mask, other=0.0)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(alibi_slopes_ptr + head)

    k_ptr = kv_ptr + (head // group) * kv_head_stride
    v_ptr = k_ptr + kv_heads * kv_head_stride
    slots_ptr = req_to_token_ptr + tl.load(b_req_idx_ptr + request).to(tl.int64) * req_stride
    end = tl.minimum(seq_len, ready_len + first_row + BLOCK_M)  # no row of this block sees a later key
    acc, _, total = attend(
        q, ready_len + rows, slopes, slots_ptr, k_ptr, v_ptr, slot_stride, 0, end, dim, scale, BLOCK_N
    )
    out_ptrs = out_ptr + tokens[:, None] * out_token_stride + head * out_head_stride + cols
    tl.store(out_ptrs, acc / total[:, None], mask=mask)


@ops.context_attention.impl("triton")
def context_attention(
    q: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, scale: float, alibi_slopes: Tensor | None = None
) -> Tensor:
    check_attention("context_attention", q, kv_cache, batch)
    tokens, heads, dim = q.shape
    out = q.new_empty(q.shape)
    if tokens == 0:
        return out
    kv_heads = kv_cache.shape[1] // 2
    block_d = dot_block(dim)
    block = keys_a_tile(q.dtype, block_d)  # query rows a tile too
    _context_attention_kernel[(triton.cdiv(batch.max_q_len, block), heads, batch.b_req_idx.shape[0])](
        q,
        kv_cache,
        out,
        alibi_slopes,
        batch.req_to_token,
        batch.b_req_idx,
        batch.b_start_loc,
        batch.b_seq_len,
        batch.b_ready_cache_len,
        q.stride(0),
        q.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        out.stride(0),
        out.stride(1),
        batch.req_to_token.stride(0),
        kv_heads,
        heads // kv_heads,
        dim,
        scale,
        BLOCK_M=block,
        BLOCK_N=block,
        BLOCK_D=block_d,
    )
    return out
