"""Attention of single query rows: the keys of all requests are cut into items, a program each (``_token_items.py``).

What is launched depends on the number of requests alone, so that a CUDA graph serves any lengths, and any requests of a
mixed step: a small kernel lists the items on the device, once a step, and programs without an item end at once. A
program serves all query heads that share a kv head, so each key and value is loaded once. Where a request has several
items, the program that finishes last merges them, in their order: which one that is does not show in the result. The
length of an item depends on the whole batch, so the last bits of a request's result do too.

Where requests share a prefix, another kernel attends to that before (``_shared_prefix.py``). The items are then of what
comes behind it, and who merges them folds in the partial results of the prefix last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._attention import LOG2_E, MIN_DOT, dot_block, head_block
from lightserve.common.triton_kernel._blocks import next_power_of_2
from lightserve.common.triton_kernel._card import fits, programs_per_multiprocessor, stages_that_fit
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._shared_prefix import MAX_PARTS, launch_shared, plan_shared
from lightserve.common.triton_kernel._token_items import ITEM_FIELDS, Plan, plan


@dataclass(frozen=True, slots=True)
class Config:
    """How a program walks its keys."""

    block_n: int  # keys a tile
    num_warps: int
    num_stages: int  # tiles of K and V, and of their slots before them, on the way at once
    at_once: int  # programs that run side by side on a multiprocessor, as far as its memory and registers go


@triton.jit
def _attend(q, slopes, slots_ptr, k_ptr, v_ptr, slot_stride, begin, end, seq_len, scale, DIM, BLOCK_N: tl.constexpr):
    """Softmax over the keys ``begin`` .. ``end``: their values' weighted sum, the largest score, the sum of weights.

    ``q`` ``[M, D]``; ``slopes`` ``[M]`` or None; scores are in base 2.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # The slots of a tile are loaded a tile ahead: a load that waits for another's address would not be pipelined.
    keys = begin + tl.arange(0, BLOCK_N)
    next_slots = tl.load(slots_ptr + keys, mask=keys < end, other=0)
    for start in range(begin, end, BLOCK_N):
        slots = next_slots.to(tl.int64)
        keys = start + tl.arange(0, BLOCK_N)
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        is_key = keys < end
        # A masked V is 0, not what the slot holds: 0 * NaN is NaN, and a slot never written may hold one.
        mask = is_key[:, None] & (cols[None, :] < DIM)
        k = tl.load(k_ptr + slots[:, None] * slot_stride + cols, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + slots[:, None] * slot_stride + cols, mask=mask, other=0.0).to(q.dtype)

        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        if slopes is not None:
            scores += slopes[:, None] * (keys - seq_len + 1)
        scores = tl.where(is_key[None, :], scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        acc = tl.dot(weights.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _fold_parts(softmax, partial_ptr, log_sum_ptr, first, count, heads, first_head, GROUP: tl.constexpr, DIM):
    """Fold ``count`` partial results, eight at a time in their order, into the softmax ``[M, D]`` of ``GROUP`` heads.

    The loads pass by the first cache, which knows nothing of what other programs have written.
    """
    AT_ONCE: tl.constexpr = 8
    acc, peak, total = softmax
    members = tl.arange(0, acc.shape[0])
    cols = tl.arange(0, acc.shape[1])
    for begin in range(0, count, AT_ONCE):
        items = begin + tl.arange(0, AT_ONCE)
        is_part = (items[:, None] < count) & (members[None, :] < GROUP)
        parts = (first + items).to(tl.int64)[:, None] * heads + first_head + members[None, :]
        log_sums = tl.load(log_sum_ptr + parts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        mask = is_part[:, :, None] & (cols < DIM)[None, None, :]
        partials = tl.load(partial_ptr + parts[:, :, None] * DIM + cols, mask=mask, other=0.0, cache_modifier=".cg")

        # Not of -inf, which the heads past the group have alone: -inf - -inf is NaN.
        new_peak = tl.maximum(tl.maximum(peak, tl.max(log_sums, axis=0)), -1e38)
        weights = tl.exp2(log_sums - new_peak[None, :])
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * partials, axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _merge(own, shared, first, count, sharer, heads, first_head, GROUP, DIM, M: tl.constexpr, D: tl.constexpr):
    """The result ``[M, D]`` of ``GROUP`` heads out of those of ``count`` items and of the prefix of ``sharer``, if any.

    ``own``: where partial results and their log-sums are; ``shared``: how many a request has of its prefix, and these.
    """
    partial_ptr, log_sum_ptr = own
    acc = tl.zeros([M, D], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    softmax = _fold_parts((acc, peak, total), partial_ptr, log_sum_ptr, first, count, heads, first_head, GROUP, DIM)
    b_parts_ptr, partial_ptr, log_sum_ptr = shared
    if b_parts_ptr is not None:
        count = tl.load(b_parts_ptr + sharer, mask=sharer >= 0, other=0)
        first = sharer * MAX_PARTS
        softmax = _fold_parts(softmax, partial_ptr, log_sum_ptr, first, count, heads, first_head, GROUP, DIM)
    acc, _, total = softmax
    return acc / tl.where(tl.arange(0, M) < GROUP, total, 1.0)[:, None]


@triton.jit
def _token_attention_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    alibi_slopes_ptr,
    req_to_token_ptr,
    items_ptr,
    arrivals_ptr,
    partial_ptr,
    log_sum_ptr,
    b_parts_ptr,
    shared_partial_ptr,
    shared_log_sum_ptr,
    q_token_stride,
    q_head_stride,
    slot_stride,
    kv_head_stride,
    out_token_stride,
    out_head_stride,
    req_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    kv_head = tl.program_id(0)  # neighbours read neighbouring lines of the same slots
    item = tl.program_id(1).to(tl.int64)
    item_ptr = items_ptr + item * ITEM_FIELDS
    # All at once, before the test of one: another wait for memory would cost as much as a tile.
    query_row, req_idx = tl.load(item_ptr).to(tl.int64), tl.load(item_ptr + 1).to(tl.int64)
    begin, end, seq_len = tl.load(item_ptr + 2), tl.load(item_ptr + 3), tl.load(item_ptr + 4)
    first, count = tl.load(item_ptr + 5), tl.load(item_ptr + 6)
    sharer = -1 if b_parts_ptr is None else tl.load(item_ptr + 7)
    if count == 0:
        return
    slots_ptr = req_to_token_ptr + req_idx * req_stride

    members = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    first_head = kv_head * GROUP
    mask = (members[:, None] < GROUP) & (cols[None, :] < DIM)
    q_ptrs = q_ptr + query_row * q_token_stride + (first_head + members)[:, None] * q_head_stride + cols
    q = tl.load(q_ptrs, mask=mask, other=0.0)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + first_head + members, mask=members < GROUP, other=0.0) * LOG2_E
    k_ptr = kv_ptr + kv_head * kv_head_stride
    v_ptr = k_ptr + KV_HEADS * kv_head_stride
    acc, peak, total = _attend(
        q, slopes, slots_ptr, k_ptr, v_ptr, slot_stride, begin, end, seq_len, scale, DIM, BLOCK_N
    )
    acc /= (
        total[:, None] if b_parts_ptr is None else tl.where(total > 0, total, 1.0)[:, None]
    )  # an item may have no keys

    out_ptr += query_row * out_token_stride + first_head * out_head_stride
    if (count == 1) & (sharer < 0):
        tl.store(out_ptr + members[:, None] * out_head_stride + cols, acc, mask=mask)
        return
    heads = KV_HEADS * GROUP
    parts = item * heads + first_head + members
    tl.store(partial_ptr + parts[:, None] * DIM + cols, acc, mask=mask)
    tl.store(log_sum_ptr + parts, peak + tl.log2(total), mask=members < GROUP)
    tl.debug_barrier()  # all of the program has stored before it says so
    arrivals_ptr += first * KV_HEADS + kv_head
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") != count - 1:
        return
    tl.store(arrivals_ptr, 0)  # for the next layer
    own, shared = (partial_ptr, log_sum_ptr), (b_parts_ptr, shared_partial_ptr, shared_log_sum_ptr)
    merged = _merge(own, shared, first, count, sharer, heads, first_head, GROUP, DIM, BLOCK_GROUP, BLOCK_D)
    members = tl.arange(0, BLOCK_GROUP)
    mask = (members[:, None] < GROUP) & (cols[None, :] < DIM)
    tl.store(out_ptr + members[:, None] * out_head_stride + cols, merged, mask=mask)


def config_of(dtype: torch.dtype, block_d: int, block_m: int) -> Config:
    """The tiles of a program, as many as its card has room for.

    Those for rows up to 256 bytes are the fastest of an H200 for 64 requests of 1,150 tokens in bfloat16. Those for
    longer rows are a guess.
    """
    row_bytes = dtype.itemsize * block_d
    config = Config(block_n=32, num_warps=4, num_stages=3, at_once=2)
    if row_bytes <= 128:
        config = Config(block_n=64, num_warps=4, num_stages=3, at_once=6)
    elif row_bytes <= 256:
        config = Config(block_n=32, num_warps=2, num_stages=4, at_once=4)
    key_bytes, query_bytes = 2 * row_bytes, block_m * row_bytes  # of a key with its value, and of all queries
    block_n = config.block_n
    while block_n > MIN_DOT and not fits(block_n * key_bytes, 2, query_bytes):
        block_n //= 2
    stages = stages_that_fit(block_n * key_bytes, config.num_stages, query_bytes)
    at_once = programs_per_multiprocessor(config.at_once)
    return replace(config, block_n=block_n, num_stages=stages, at_once=at_once)


def launch(q: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions, out: Tensor) -> None:
    """Fill of ``out``, like ``q`` ``[tokens, heads, dim]``, the row of each request that has exactly one.

    Layers of the same shape share a plan in ``batch.plans``.
    """
    _check(q, kv_cache)
    _, heads, dim = q.shape
    if len(batch.b_seq_len) == 0:
        return
    kv_heads = kv_cache.shape[1] // 2
    block_d = head_block(dim)
    block_m = dot_block(heads // kv_heads)
    config = config_of(kv_cache.dtype, block_d, block_m)
    key = ("token_attention", heads, kv_heads, dim, kv_cache.dtype, q.dtype, options.key)
    found: Plan | None = batch.plans.get(key)
    if found is None:
        options.refuse_all_but("triton", "alibi_slopes")
        shared = None if batch.shared_prefixes is None else plan_shared(batch, q, kv_heads, batch.shared_prefixes)
        found = batch.plans[key] = plan(batch, (heads, kv_heads), dim, config.block_n, config.at_once, shared)
    shared = found.shared
    if shared is not None:
        launch_shared(q, kv_cache, batch, options, shared)
    _token_attention_kernel[(kv_heads, len(found.items))](
        q,
        kv_cache,
        out,
        options.alibi_slopes,
        batch.req_to_token,
        found.items,
        found.arrivals,
        found.partials,
        found.log_sums,
        None if shared is None else shared.b_parts,
        None if shared is None else shared.partials,
        None if shared is None else shared.log_sums,
        q.stride(0),
        q.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        out.stride(0),
        out.stride(1),
        batch.req_to_token.stride(0),
        options.scale * LOG2_E.value,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        BLOCK_GROUP=next_power_of_2(heads // kv_heads),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _check(q: Tensor, kv_cache: Tensor) -> None:
    check_last_contiguous("token_attention", q=q, kv_cache=kv_cache)
    heads, dim = q.shape[1:]
    if kv_cache.shape[2] != dim or 2 * heads % kv_cache.shape[1]:
        raise ValueError(
            f"token_attention: {heads} heads of {dim} cannot share the cache's {kv_cache.shape[1] / 2:g} of "
            f"{kv_cache.shape[2]}"
        )


@ops.token_attention.impl("triton")
def token_attention(q: Tensor, kv_cache: Tensor, batch: ops.AttnBatch, options: ops.AttnOptions) -> Tensor:
    out = q.new_empty(q.shape)
    launch(q, kv_cache, batch, options, out)
    return out
