"""Latent attention of decode rows: absorbed queries, and one program for each split of a request's latents and block of
heads.

The work list is that of token attention (``_token_splits.py``). If a request has several splits, a second kernel merges
their partial results, with a program for each head: a partial result of 16 heads has 32 KiB, and one program would take
longer to read those of a long request than all programs take to read its latents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.latent_attention import LatentSizes, latent_sizes
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of
from lightserve.common.triton_kernel._gpu import fits, programs_per_multiprocessor, stages_that_fit, uses_asm
from lightserve.common.triton_kernel.attention._attention import LOG2_E, MIN_DOT, dot_block, head_block
from lightserve.common.triton_kernel.attention._online_softmax import empty_softmax, load_rows
from lightserve.common.triton_kernel.attention._token_splits import SPLIT_FIELDS, SplitPlan, plan_splits
from lightserve.common.triton_kernel.latent._latent import attend_latents, parts_of

MERGED_AT_ONCE = tl.constexpr(8)  # partial results
MAX_FEW_HEADS = 32  # more heads compute for longer than their latents take to load, and want larger tiles


@dataclass(frozen=True, slots=True)
class Config:
    """The loop of a program over its latents."""

    block_h: int  # heads
    block_n: int  # latents of a tile
    num_warps: int
    num_stages: int
    programs_per_sm: int


@triton.jit
def _latent_token_attention_kernel(
    q_ptr,
    q_pe_ptr,
    cache_ptr,
    cache_pe_ptr,
    scales_ptr,
    out_ptr,
    req_to_token_ptr,
    splits_ptr,
    partial_ptr,
    log_sum_ptr,
    q_token_stride,
    q_head_stride,
    q_pe_token_stride,
    q_pe_head_stride,
    slot_stride,
    slot_pe_stride,
    scale_stride,
    out_token_stride,
    out_head_stride,
    req_stride,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    split = tl.program_id(1).to(tl.int64)
    split_ptr = splits_ptr + split * SPLIT_FIELDS
    row, req_idx = tl.load(split_ptr).to(tl.int64), tl.load(split_ptr + 1).to(tl.int64)
    begin, end, count = tl.load(split_ptr + 2), tl.load(split_ptr + 3), tl.load(split_ptr + 6)
    if count == 0:
        return

    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    cols = tl.arange(0, BLOCK_R)
    pe_cols = tl.arange(0, BLOCK_ROPE)
    q = load_rows(q_ptr + row * q_token_stride, heads * q_head_stride, cols, is_head, RANK)
    q_pe = load_rows(q_pe_ptr + row * q_pe_token_stride, heads * q_pe_head_stride, pe_cols, is_head, ROPE)
    slots_ptr = req_to_token_ptr + req_idx * req_stride
    cache = (slots_ptr, cache_ptr, cache_pe_ptr, scales_ptr, slot_stride, slot_pe_stride, scale_stride)
    softmax = empty_softmax(BLOCK_H, BLOCK_R)
    acc, peak, total = attend_latents(
        q, q_pe, softmax, cache, begin, end, None, scale, RANK, ROPE, BLOCK_N, LOOP_STAGES, USE_ASM
    )

    acc /= total[:, None]
    mask = is_head[:, None] & (cols < RANK)[None, :]
    if count == 1:
        tl.store(out_ptr + row * out_token_stride + heads[:, None] * out_head_stride + cols[None, :], acc, mask=mask)
        return
    parts = split * HEADS + heads
    tl.store(partial_ptr + parts[:, None] * RANK + cols[None, :], acc, mask=mask)
    tl.store(log_sum_ptr + parts, peak + tl.log2(total), mask=is_head)


@triton.jit
def _merge_latent_splits_kernel(
    splits_ptr,
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The program of a request's first split merges all of them for one head, in their order."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    split_ptr = splits_ptr + split * SPLIT_FIELDS
    row, first, count = tl.load(split_ptr).to(tl.int64), tl.load(split_ptr + 5), tl.load(split_ptr + 6)
    if count < 2:
        return
    if first != split:
        return
    cols = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_R], tl.float32)
    peak = float("-inf")
    total = 0.0
    for begin in range(0, count, MERGED_AT_ONCE):
        numbers = begin + tl.arange(0, MERGED_AT_ONCE)
        parts = (first + numbers).to(tl.int64) * HEADS + head
        log_sums = tl.load(log_sum_ptr + parts, mask=numbers < count, other=float("-inf"))
        mask = (numbers < count)[:, None] & (cols < RANK)[None, :]
        partials = tl.load(partial_ptr + parts[:, None] * RANK + cols[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(log_sums, axis=0))
        weights = tl.exp2(log_sums - new_peak)
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay + tl.sum(weights[:, None] * partials, axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        peak = new_peak
    out_ptrs = out_ptr + row * out_token_stride + head * out_head_stride + cols
    tl.store(out_ptrs, acc / total, mask=cols < RANK)


def config_of(dtype: torch.dtype, sizes: LatentSizes, has_codes: bool = False) -> Config:
    """The largest tiles that fit the GPU. ``has_codes``: latents are quantised.

    In bfloat16 with a rank of 512, 64 to 128 requests of 4,096 tokens and 16 heads, 32 latents a tile reached 3.4 to
    3.7 TB/s on an H200; with 128 heads, blocks of 64 heads and tiles of 64 latents 234 TFLOP/s. These were kernels of
    their own, without a work list. 256 requests of 4,096 tokens and 16 heads in fp8 take 248 us with 64 latents a tile
    and 316 with 32, in bfloat16 326; in int8 262 and 305.
    """
    is_few = sizes.heads <= MAX_FEW_HEADS
    block_h = dot_block(sizes.heads) if is_few else 64
    block_n, num_warps, num_stages, programs_per_sm = (32, 4, 3, 2) if is_few else (64, 8, 2, 1)
    if is_few and has_codes:
        block_n, num_stages = 64, 2
    row_bytes = dtype.itemsize * (head_block(sizes.rank) + dot_block(sizes.rope))
    query_bytes = block_h * row_bytes
    if block_h > MIN_DOT and not fits(MIN_DOT * row_bytes, 2, query_bytes):
        block_h, num_warps = MIN_DOT, 4
        query_bytes = block_h * row_bytes
    while block_n > MIN_DOT and not fits(block_n * row_bytes, 2, query_bytes):
        block_n //= 2
    return Config(
        block_h=block_h,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=stages_that_fit(block_n * row_bytes, num_stages, query_bytes),
        programs_per_sm=programs_per_multiprocessor(programs_per_sm),
    )


class _Plan(NamedTuple):
    """What all layers of a step share that have one shape."""

    config: Config
    splits: SplitPlan


def attend_absorbed(
    q: Tensor, q_pe: Tensor, latent_cache: ops.LatentCache, batch: ops.AttnBatch, scale: float, sizes: LatentSizes
) -> Tensor:
    """``[requests, heads, rank]``: the weighted latents of each request with exactly one query row.

    ``q`` ``[requests, heads, rank]`` is absorbed, ``q_pe`` ``[requests, heads, rope]`` rotated; row i is of request i.
    The rows of other requests are not written.
    """
    out = q.new_empty(q.shape)
    if len(q) == 0:
        return out
    key = ("latent_token_attention", sizes, latent_cache.dtype, q.dtype)
    plan: _Plan | None = batch.plans.get(key)
    if plan is None:
        plan = batch.plans[key] = _make_plan(q, latent_cache, batch, sizes)
    config, split_plan = plan
    cache = parts_of("latent_token_attention", latent_cache, sizes.rank)
    strides = (out.stride(0), out.stride(1))
    _latent_token_attention_kernel[(cdiv(sizes.heads, config.block_h), len(split_plan.splits))](
        q,
        q_pe,
        cache.latents,
        cache.key_parts,
        cache.scales,
        out,
        batch.req_to_token,
        split_plan.splits,
        split_plan.partials,
        split_plan.log_sums,
        q.stride(0),
        q.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        cache.slot_stride,
        cache.pe_stride,
        cache.scale_stride,
        *strides,
        batch.req_to_token.stride(0),
        scale * LOG2_E.value,
        HEADS=sizes.heads,
        RANK=sizes.rank,
        ROPE=sizes.rope,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        BLOCK_R=head_block(sizes.rank),
        BLOCK_ROPE=dot_block(sizes.rope),
        LOOP_STAGES=cache.loop_stages(config.num_stages),
        USE_ASM=uses_asm(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    _merge_latent_splits_kernel[(sizes.heads, len(split_plan.splits))](
        split_plan.splits,
        split_plan.partials,
        split_plan.log_sums,
        out,
        *strides,
        HEADS=sizes.heads,
        RANK=sizes.rank,
        BLOCK_R=next_power_of_2(sizes.rank),
    )
    return out


def _make_plan(q: Tensor, latent_cache: ops.LatentCache, batch: ops.AttnBatch, sizes: LatentSizes) -> _Plan:
    check_last_contiguous("latent_token_attention", **tensors_of(batch))
    config = config_of(q.dtype, sizes, isinstance(latent_cache, ops.QuantizedLatents))
    head_shape = (sizes.heads, cdiv(sizes.heads, config.block_h), sizes.rank)
    b_row = torch.arange(len(batch.b_req_idx), dtype=torch.int32, device=batch.b_req_idx.device)
    by_request = replace(batch, b_start_loc=b_row)
    return _Plan(config, plan_splits(by_request, head_shape, config.block_n, config.programs_per_sm))


def check(op: str, q: Tensor, latent_cache: ops.LatentCache, kv_b: Tensor, options: ops.AttnOptions) -> LatentSizes:
    check_last_contiguous(op, q=q, kv_b=kv_b)
    options.check_supported("triton")
    return latent_sizes(q, latent_cache, kv_b)


def attend_decodes(
    q: Tensor, latent_cache: ops.LatentCache, kv_b: Tensor, batch: ops.AttnBatch, scale: float, sizes: LatentSizes
) -> Tensor:
    """Like the op, for requests with exactly one query row; the rows of other requests are undefined."""
    absorbed = q.new_empty(len(q), sizes.heads, sizes.rank)
    torch.bmm(q[..., : sizes.nope].transpose(0, 1), kv_b[:, : sizes.nope], out=absorbed.transpose(0, 1))
    attended = attend_absorbed(absorbed, q[..., sizes.nope :], latent_cache, batch, scale, sizes)
    out = q.new_empty(len(q), sizes.heads, sizes.value)
    torch.bmm(attended.transpose(0, 1), kv_b[:, sizes.nope :].transpose(1, 2), out=out.transpose(0, 1))
    return out


@ops.latent_token_attention.impl("triton")
def latent_token_attention(
    q: Tensor, latent_cache: ops.LatentCache, kv_b: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions
) -> Tensor:
    sizes = check("latent_token_attention", q, latent_cache, kv_b, options)
    return attend_decodes(q, latent_cache, kv_b, batch, options.scale, sizes)
