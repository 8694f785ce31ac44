"""Attention of decode rows: split-KV, with one program for each split of a request's keys (``_token_splits.py``).

The grid depends only on the number of requests, so a CUDA graph serves any lengths and any mixed step. A small kernel
lists the splits on the device, once per step; programs without a split end at once. A program serves all query heads
that share a kv head, so each key and value is loaded once. If a request has several splits, the program that finishes
last merges their partial results, always in the same order. The length of a split depends on the whole batch, so the
last bits of a request's result do too.

If requests share a prefix, another kernel attends to it first (``_shared_prefix.py``). The splits then cover only the
keys behind the prefix, and the merge adds the partial results of the prefix last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._gpu import fits, programs_per_multiprocessor, stages_that_fit, uses_asm
from lightserve.common.triton_kernel.attention._attention import (
    LOG2_E,
    MIN_DOT,
    cap_scores,
    dot_block,
    head_block,
    score_factors,
)
from lightserve.common.triton_kernel.attention._kv_codes import (
    convert,
    for_codes,
    load_scales,
    parts_of,
    scale_scores,
    scale_values,
    score_factor,
    weights_of_codes,
)
from lightserve.common.triton_kernel.attention._shared_prefix import (
    SharedPrefixPlan,
    launch_shared_prefix,
    plan_shared_prefix,
)
from lightserve.common.triton_kernel.attention._token_splits import SPLIT_FIELDS, SplitPlan, plan_splits


@dataclass(frozen=True, slots=True)
class Config:
    """The loop of a program over its keys."""

    block_m: int  # query heads that share a kv head, padded
    block_d: int  # head_dim, padded
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int  # tiles of K and V, and of their slots before them, in flight
    programs_per_sm: int  # that run side by side on a multiprocessor, as far as its memory and registers allow


@triton.jit
def _attend(
    q,
    slopes,
    scale,
    softcap,
    cache,
    begin,
    end,
    seq_len,
    DIM,
    BLOCK_N: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Softmax over the keys ``begin`` .. ``end``: the weighted sum of values, the largest score, the sum of weights.

    ``q`` ``[M, D]``; ``slopes`` ``[M]`` and ``softcap`` may be None; scores are in base 2; ``cache`` is that of
    ``_online_softmax.py``.
    """
    k_ptr, v_ptr, slots_ptr, slot_stride, scales_ptr, scale_stride, k_head, v_head = cache
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # The slots of a tile are loaded one tile ahead: Triton does not pipeline a load that needs another's result.
    keys = begin + tl.arange(0, BLOCK_N)
    next_slots = tl.load(slots_ptr + keys, mask=keys < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=LOOP_STAGES):
        slots = next_slots.to(tl.int64)
        keys = start + tl.arange(0, BLOCK_N)
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        is_key = keys < end
        # A masked V must be 0: a slot that was never written may hold NaN, and 0 * NaN is NaN.
        mask = is_key[:, None] & (cols[None, :] < DIM)
        k = convert(tl.load(k_ptr + slots[:, None] * slot_stride + cols, mask=mask, other=0.0), q, USE_ASM)
        v = convert(tl.load(v_ptr + slots[:, None] * slot_stride + cols, mask=mask, other=0.0), q, USE_ASM)
        k_scales = load_scales(scales_ptr, scale_stride, k_head, slots, is_key)
        v_scales = load_scales(scales_ptr, scale_stride, v_head, slots, is_key)

        products = scale_scores(tl.dot(q, k.T, input_precision="ieee"), k_scales, scale_stride)
        scores = cap_scores(products * scale, softcap)
        if slopes is not None:
            scores += slopes[:, None] * (keys - seq_len + 1)
        scores = tl.where(is_key[None, :], scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        scaled = weights_of_codes(weights, v_scales, scale_stride)
        acc = tl.dot(scaled.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _merge_partials(softmax, partial_ptr, log_sum_ptr, parts, heads, first_head, GROUP: tl.constexpr, DIM):
    """Merge partial results, eight at a time in their order, into the softmax ``[M, D]`` of ``GROUP`` heads.

    ``parts``: the first one, how far they are apart, and how many there are. The loads bypass the L1 cache, which does
    not see what other programs have written.
    """
    AT_ONCE: tl.constexpr = 8
    acc, peak, total = softmax
    first, step, count = parts
    members = tl.arange(0, acc.shape[0])
    cols = tl.arange(0, acc.shape[1])
    for begin in range(0, count, AT_ONCE):
        splits = begin + tl.arange(0, AT_ONCE)
        is_part = (splits[:, None] < count) & (members[None, :] < GROUP)
        places = (first + splits * step).to(tl.int64)[:, None] * heads + first_head + members[None, :]
        log_sums = tl.load(log_sum_ptr + places, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        mask = is_part[:, :, None] & (cols < DIM)[None, None, :]
        partials = tl.load(partial_ptr + places[:, :, None] * DIM + cols, mask=mask, other=0.0, cache_modifier=".cg")

        # Heads past the group have nothing but -inf, and -inf - -inf is NaN.
        new_peak = tl.maximum(tl.maximum(peak, tl.max(log_sums, axis=0)), -1e38)
        weights = tl.exp2(log_sums - new_peak[None, :])
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * partials, axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _merge_splits(
    partials,
    shared,
    sinks_ptr,
    first,
    count,
    shared_req,
    heads,
    first_head,
    GROUP,
    DIM,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """The result ``[M, D]`` of ``GROUP`` heads, merged from ``count`` splits and from the shared prefix, if any.

    ``partials``: pointers to the partial results of splits and their log-sums. ``shared``: a pointer to where the
    partial results of each request's prefix are, and the same two. ``shared_req``: the request's place in the batch,
    or -1.
    """
    partial_ptr, log_sum_ptr = partials
    acc = tl.zeros([M, D], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    splits = (first, 1, count)
    softmax = _merge_partials((acc, peak, total), partial_ptr, log_sum_ptr, splits, heads, first_head, GROUP, DIM)
    b_partials_ptr, partial_ptr, log_sum_ptr = shared
    if b_partials_ptr is not None:
        at = b_partials_ptr + shared_req * 3
        first, step = tl.load(at, mask=shared_req >= 0, other=0), tl.load(at + 1, mask=shared_req >= 0, other=0)
        splits = (first, step, tl.load(at + 2, mask=shared_req >= 0, other=0))
        softmax = _merge_partials(softmax, partial_ptr, log_sum_ptr, splits, heads, first_head, GROUP, DIM)
    acc, peak, total = softmax
    if sinks_ptr is not None:
        total += _sink_weights(sinks_ptr + first_head, peak, GROUP)
    return acc / tl.where(tl.arange(0, M) < GROUP, total, 1.0)[:, None]


@triton.jit
def _sink_weights(sinks_ptr, peak, GROUP):
    """The weight of each head's sink, beside keys whose highest score is ``peak`` ``[M]``."""
    members = tl.arange(0, peak.shape[0])
    sinks = tl.load(sinks_ptr + members, mask=members < GROUP, other=0.0)
    return tl.exp2(sinks * LOG2_E - peak)


@triton.jit
def _token_attention_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    out_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    req_to_token_ptr,
    splits_ptr,
    done_counts_ptr,
    partial_ptr,
    log_sum_ptr,
    b_partials_ptr,
    shared_partial_ptr,
    shared_log_sum_ptr,
    q_token_stride,
    q_head_stride,
    slot_stride,
    kv_head_stride,
    scale_stride,
    out_token_stride,
    out_head_stride,
    req_stride,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    # neighbouring programs read neighbouring lines of the same slots
    kv_head, split = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split_ptr = splits_ptr + split * SPLIT_FIELDS
    # All fields are loaded before the first test: a second wait for memory costs as much as a tile.
    query_row, req_idx = tl.load(split_ptr).to(tl.int64), tl.load(split_ptr + 1).to(tl.int64)
    begin, end, seq_len = tl.load(split_ptr + 2), tl.load(split_ptr + 3), tl.load(split_ptr + 4)
    first, count = tl.load(split_ptr + 5), tl.load(split_ptr + 6)
    shared_req = -1 if b_partials_ptr is None else tl.load(split_ptr + 7)
    if count == 0:
        return
    slots_ptr = req_to_token_ptr + req_idx * req_stride

    members, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    first_head = kv_head * GROUP
    mask = (members[:, None] < GROUP) & (cols[None, :] < DIM)
    q_ptrs = q_ptr + query_row * q_token_stride + (first_head + members)[:, None] * q_head_stride + cols
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + first_head + members, mask=members < GROUP, other=0.0) * LOG2_E
    k_ptr, v_ptr = kv_ptr + kv_head * kv_head_stride, kv_ptr + (KV_HEADS + kv_head) * kv_head_stride
    cache = (k_ptr, v_ptr, slots_ptr, slot_stride, scales_ptr, scale_stride, kv_head, KV_HEADS + kv_head)
    q, scale = for_codes(q, scales_ptr), score_factor(scale, cache)
    acc, peak, total = _attend(
        q, slopes, scale, softcap, cache, begin, end, seq_len, DIM, BLOCK_N, LOOP_STAGES, USE_ASM
    )
    acc = scale_values(acc, cache)
    is_alone = (count == 1) & (shared_req < 0)
    if sinks_ptr is not None:  # it joins the softmax once: here, or when the splits are merged
        total += tl.where(is_alone, _sink_weights(sinks_ptr + first_head, peak, GROUP), 0.0)
    acc /= (
        total[:, None] if b_partials_ptr is None else tl.where(total > 0, total, 1.0)[:, None]
    )  # a split may have no keys

    out_ptr += query_row * out_token_stride + first_head * out_head_stride
    if is_alone:
        tl.store(out_ptr + members[:, None] * out_head_stride + cols, acc, mask=mask)
        return
    parts = split * (KV_HEADS * GROUP) + first_head + members
    tl.store(partial_ptr + parts[:, None] * DIM + cols, acc, mask=mask)
    tl.store(log_sum_ptr + parts, peak + tl.log2(total), mask=members < GROUP)
    tl.debug_barrier()  # all threads have stored before the program is counted as done
    done_counts_ptr += first * KV_HEADS + kv_head
    if tl.atomic_add(done_counts_ptr, 1, sem="acq_rel") != count - 1:
        return
    tl.store(done_counts_ptr, 0)  # for the next layer
    shared = (b_partials_ptr, shared_partial_ptr, shared_log_sum_ptr)
    merged = _merge_splits(
        (partial_ptr, log_sum_ptr),
        shared,
        sinks_ptr,
        first,
        count,
        shared_req,
        KV_HEADS * GROUP,
        first_head,
        GROUP,
        DIM,
        BLOCK_GROUP,
        BLOCK_D,
    )
    members = tl.arange(0, BLOCK_GROUP)
    mask = (members[:, None] < GROUP) & (cols[None, :] < DIM)
    tl.store(out_ptr + members[:, None] * out_head_stride + cols, merged, mask=mask)


def config_of(dtype: torch.dtype, block_d: int, block_m: int) -> Config:
    """The largest tiles that fit the GPU.

    For rows up to 256 bytes they are the fastest on an H200 for 64 requests of 1,150 tokens in bfloat16; those for
    longer rows were not measured. 256 such requests take 287 us in bfloat16; in fp8 180 us with 2 warps and 238
    with 4; in int8 217 and 271.
    """
    row_bytes = dtype.itemsize * block_d
    block_n, num_warps, num_stages, programs_per_sm = 32, 4, 3, 2
    if dtype.itemsize == 1 and row_bytes <= 128:
        block_n, num_warps, num_stages, programs_per_sm = 64, 2, 3, 4
    elif row_bytes <= 128:
        block_n, num_warps, num_stages, programs_per_sm = 64, 4, 3, 6
    elif row_bytes <= 256:
        block_n, num_warps, num_stages, programs_per_sm = 32, 2, 4, 4
    key_bytes, query_bytes = 2 * row_bytes, block_m * row_bytes  # of a key with its value, and of all queries
    while block_n > MIN_DOT and not fits(block_n * key_bytes, 2, query_bytes):
        block_n //= 2
    return Config(
        block_m=block_m,
        block_d=block_d,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=stages_that_fit(block_n * key_bytes, num_stages, query_bytes),
        programs_per_sm=programs_per_multiprocessor(programs_per_sm),
    )


class _Plan(NamedTuple):
    """What all layers of a step share that have one shape and the same options."""

    config: Config
    splits: SplitPlan
    shared: SharedPrefixPlan | None  # None: no requests share a prefix


def _make_plan(q: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, window: int | None) -> _Plan:
    heads, kv_heads, dim = q.shape[1], kv_cache.shape[1] // 2, q.shape[2]
    config = config_of(kv_cache.dtype, head_block(dim), dot_block(heads // kv_heads))
    groups = batch.shared_prefixes if window is None else None  # a window may begin behind the prefix
    shared = None if groups is None else plan_shared_prefix(batch, q, kv_heads, groups)
    b_shared_len = None if shared is None else shared.b_shared_len
    head_shape = (heads, kv_heads, dim)
    splits = plan_splits(batch, head_shape, config.block_n, config.programs_per_sm, window, b_shared_len)
    return _Plan(config, splits, shared)


def launch(q: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, options: ops.AttnOptions, out: Tensor) -> None:
    """Write the rows of ``out`` ``[tokens, heads, dim]`` that belong to requests with exactly one query row.

    Layers of the same shape and options share a plan in ``batch.plans``.
    """
    _check(q, kv_cache)
    cache, scales, scale_stride = parts_of(kv_cache)
    _, heads, dim = q.shape
    if len(batch.b_seq_len) == 0:
        return
    kv_heads = kv_cache.shape[1] // 2
    key = ("token_attention", heads, kv_heads, dim, kv_cache.dtype, q.dtype, options.key)
    plan: _Plan | None = batch.plans.get(key)
    if plan is None:
        options.check_supported("triton", "alibi_slopes", "causal", "window", "softcap", "sinks")
        plan = batch.plans[key] = _make_plan(q, kv_cache, batch, options.window)
    config, split_plan, shared = plan
    if shared is not None:
        launch_shared_prefix(q, kv_cache, batch, options, shared)
    scale, softcap = score_factors(options.scale, options.softcap)
    _token_attention_kernel[(kv_heads, len(split_plan.splits))](
        q,
        cache,
        scales,
        out,
        options.alibi_slopes,
        options.sinks,
        batch.req_to_token,
        split_plan.splits,
        split_plan.done_counts,
        split_plan.partials,
        split_plan.log_sums,
        None if shared is None else shared.b_partials,
        None if shared is None else shared.partials,
        None if shared is None else shared.log_sums,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        scale_stride,
        out.stride(0),
        out.stride(1),
        batch.req_to_token.stride(0),
        scale,
        softcap,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=config.block_d,
        BLOCK_GROUP=next_power_of_2(heads // kv_heads),
        # Triton pipelines only loads that feed a dot, unless the loop names its stages; the scales of tokens do not.
        LOOP_STAGES=None if scale_stride is None else config.num_stages,
        USE_ASM=uses_asm(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _check(q: Tensor, kv_cache: ops.KvCache) -> None:
    check_last_contiguous("token_attention", q=q, kv_cache=parts_of(kv_cache).numbers)
    heads, dim = q.shape[1:]
    if kv_cache.shape[2] != dim or 2 * heads % kv_cache.shape[1]:
        raise ValueError(
            f"token_attention: {heads} heads of {dim} cannot share the cache's {kv_cache.shape[1] / 2:g} of "
            f"{kv_cache.shape[2]}"
        )


@ops.token_attention.impl("triton")
def token_attention(q: Tensor, kv_cache: ops.KvCache, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    out = q.new_empty(q.shape)
    launch(q, kv_cache, batch, options, out)
    return out
