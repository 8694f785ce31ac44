"""Attention of a decode step, in two stages: each split of a request's keys by a program, then the splits together.

A program of the first stage serves all query heads that share a kv head, so each key and value is loaded once. A
request is cut by its own length, not by the longest of the batch: it fills the grid whatever ``max_seq_len`` a CUDA
graph was captured with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._attention import attend, check_attention, dot_block, keys_a_tile

MIN_SPLIT = 128  # keys; a shorter split costs more to merge than to read
MAX_SPLITS = 32  # bounds the partial sums: 512 KiB a request at 32 heads of 128


@triton.jit
def _split_len(seq_len, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.cdiv(tl.cdiv(seq_len, SPLITS), BLOCK_N) * BLOCK_N


@triton.jit
def _token_attention_split_kernel(
    q_ptr,
    kv_ptr,
    partial_ptr,
    log_sum_ptr,
    alibi_slopes_ptr,
    req_to_token_ptr,
    b_req_idx_ptr,
    b_seq_len_ptr,
    q_token_stride,
    q_head_stride,
    slot_stride,
    kv_head_stride,
    req_stride,
    kv_heads,
    group,
    dim,
    scale,
    SPLITS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(b_seq_len_ptr + request)
    begin = split * _split_len(seq_len, SPLITS, BLOCK_N)
    end = tl.minimum(seq_len, begin + _split_len(seq_len, SPLITS, BLOCK_N))
    if begin >= end:
        return

    members = tl.arange(0, BLOCK_GROUP)
    heads = kv_head * group + members
    cols = tl.arange(0, BLOCK_D)
    mask = (members[:, None] < group) & (cols[None, :] < dim)
    q_ptrs = q_ptr + request * q_token_stride + heads[:, None] * q_head_stride + cols
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=members < group, other=0.0)

    k_ptr = kv_ptr + kv_head * kv_head_stride
    v_ptr = k_ptr + kv_heads * kv_head_stride
    slots_ptr = req_to_token_ptr + tl.load(b_req_idx_ptr + request).to(tl.int64) * req_stride
    q_positions = tl.zeros([BLOCK_GROUP], tl.int32) + seq_len - 1
    acc, peak, total = attend(
        q, q_positions, slopes, slots_ptr, k_ptr, v_ptr, slot_stride, begin, end, dim, scale, BLOCK_N
    )
    parts = (request * kv_heads * group + heads) * SPLITS + split
    tl.store(partial_ptr + parts[:, None] * dim + cols, acc / total[:, None], mask=mask)
    tl.store(log_sum_ptr + parts, peak + tl.log(total), mask=members < group)


@triton.jit
def _token_attention_merge_kernel(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    b_seq_len_ptr,
    heads,
    dim,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = request * heads + tl.program_id(1)
    seq_len = tl.load(b_seq_len_ptr + request)
    splits = tl.arange(0, BLOCK_SPLITS)
    cols = tl.arange(0, BLOCK_D)
    is_filled = splits * _split_len(seq_len, SPLITS, BLOCK_N) < seq_len  # the first stage left the others unwritten

    log_sums = tl.load(log_sum_ptr + row * SPLITS + splits, mask=is_filled, other=float("-inf"))
    weights = tl.exp(log_sums - tl.max(log_sums, axis=0))
    partial_ptrs = partial_ptr + (row * SPLITS + splits[:, None]) * dim + cols
    partials = tl.load(partial_ptrs, mask=is_filled[:, None] & (cols[None, :] < dim), other=0.0)
    out = tl.sum(weights[:, None] * partials, axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + row * dim + cols, out, mask=cols < dim)


@ops.token_attention.impl("triton")
def token_attention(
    q: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, scale: float, alibi_slopes: Tensor | None = None
) -> Tensor:
    check_attention("token_attention", q, kv_cache, batch)
    requests, heads, dim = q.shape
    out = q.new_empty(q.shape)
    if requests == 0:
        return out
    kv_heads = kv_cache.shape[1] // 2
    splits = min(triton.cdiv(batch.max_seq_len, MIN_SPLIT), MAX_SPLITS)
    block_d = dot_block(dim)
    blocks = {"SPLITS": splits, "BLOCK_N": keys_a_tile(q.dtype, block_d), "BLOCK_D": block_d}
    partials = q.new_empty((requests, heads, splits, dim), dtype=torch.float32)
    log_sums = q.new_empty((requests, heads, splits), dtype=torch.float32)
    _token_attention_split_kernel[(requests, kv_heads, splits)](
        q,
        kv_cache,
        partials,
        log_sums,
        alibi_slopes,
        batch.req_to_token,
        batch.b_req_idx,
        batch.b_seq_len,
        q.stride(0),
        q.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        batch.req_to_token.stride(0),
        kv_heads,
        heads // kv_heads,
        dim,
        scale,
        BLOCK_GROUP=dot_block(heads // kv_heads),
        **blocks,
    )
    _token_attention_merge_kernel[(requests, heads)](
        partials,
        log_sums,
        out,
        batch.b_seq_len,
        heads,
        dim,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        **blocks,
    )
    return out
