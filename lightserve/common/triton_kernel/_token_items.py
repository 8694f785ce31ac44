"""The items of token attention: the keys of all requests cut into pieces of about equal length, on the device.

Of a request that shares a prefix, only the keys behind that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, few_sizes
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of
from lightserve.common.triton_kernel._shared_prefix import SharedPlan

# Wanted, over all kv heads: as many as run at once, three on each multiprocessor of an H200. 64 requests of 1,150
# tokens take 77 us, with twelve each 88 us, and one of 100,000 takes 113 us, with twelve 143 us.
PROGRAMS = 132 * 3
MIN_ITEM = 64  # keys; a shorter item costs more to merge than to read
# int32 each: query row, row of req_to_token, begin, end, seq_len; of its request the first item and how many there are;
# where prefixes are shared, the request's place in the batch, or -1 if it shares none
ITEM_FIELDS = tl.constexpr(8)
CLEARED = tl.constexpr(256)  # arrivals at once


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of a step share: the items and room for their results."""

    items: Tensor  # [max items, ITEM_FIELDS] int32; those past the last have 0 items
    arrivals: Tensor  # [max items, kv_heads] int32: at a request's first item those that are done; 0 between launches
    partials: Tensor  # [max items, heads, dim] float32
    log_sums: Tensor  # [max items, heads] float32, base 2
    shared: SharedPlan | None  # where requests may share prefixes


@triton.jit(do_not_specialize=["requests", "max_items", "wanted", "min_item"])
def _token_attention_plan_kernel(
    b_req_idx_ptr,
    b_start_loc_ptr,
    b_seq_len_ptr,
    b_ready_cache_len_ptr,
    b_shared_len_ptr,
    items_ptr,
    arrivals_ptr,
    requests,
    max_items,
    kv_heads,
    wanted,
    min_item,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    is_request = lanes < requests
    req_idx = tl.load(b_req_idx_ptr + lanes, mask=is_request, other=0)
    query_row = tl.load(b_start_loc_ptr + lanes, mask=is_request, other=0)
    seq_len = tl.load(b_seq_len_ptr + lanes, mask=is_request, other=0)
    ready_len = tl.load(b_ready_cache_len_ptr + lanes, mask=is_request, other=0)
    keys = tl.where(seq_len - ready_len == 1, seq_len, 0)
    shared_len = 0
    if b_shared_len_ptr is not None:
        shared_len = tl.load(b_shared_len_ptr + lanes, mask=is_request, other=0)
        keys -= shared_len
    longest = tl.maximum(tl.cdiv(tl.sum(keys, axis=0), wanted), min_item)
    item_len = tl.cdiv(keys, tl.maximum(tl.cdiv(keys, longest), 1))  # a request's items are alike
    item_len = tl.maximum(tl.cdiv(item_len, BLOCK_N), 1) * BLOCK_N
    count = tl.cdiv(keys, item_len)
    if b_shared_len_ptr is not None:
        count = tl.where(shared_len > 0, tl.maximum(count, 1), count)  # one of no keys merges what is shared

    # Requests of several items go first: theirs are the longest, and what starts last should be short.
    several = tl.where(count > 1, count, 0)
    single = count - several
    before = tl.where(count > 1, tl.cumsum(several, axis=0), tl.sum(several, axis=0) + tl.cumsum(single, axis=0))
    first = before - count
    for i in range(tl.max(count, axis=0)):
        item_ptrs = items_ptr + (first + i) * ITEM_FIELDS
        is_item = i < count
        tl.store(item_ptrs, query_row, mask=is_item)
        tl.store(item_ptrs + 1, req_idx, mask=is_item)
        tl.store(item_ptrs + 2, shared_len + i * item_len, mask=is_item)
        tl.store(item_ptrs + 3, tl.minimum(shared_len + (i + 1) * item_len, seq_len), mask=is_item)
        tl.store(item_ptrs + 4, seq_len, mask=is_item)
        tl.store(item_ptrs + 5, first, mask=is_item)
        tl.store(item_ptrs + 6, count, mask=is_item)
        if b_shared_len_ptr is not None:
            tl.store(item_ptrs + 7, tl.where(shared_len > 0, lanes, -1), mask=is_item)
    cells = tl.arange(0, CLEARED)
    for begin in range(tl.sum(count, axis=0), max_items, CLEARED):
        tl.store(items_ptr + (begin + cells) * ITEM_FIELDS + 6, 0, mask=begin + cells < max_items)
    for begin in range(0, max_items * kv_heads, CLEARED):
        tl.store(arrivals_ptr + begin + cells, 0, mask=begin + cells < max_items * kv_heads)


def plan(
    batch: ops.AttnBatch, heads: tuple[int, int], dim: int, block_n: int, shared: SharedPlan | None = None
) -> Plan:
    """List the items of the requests with one query row; ``heads``: of queries, of keys."""
    check_last_contiguous("token_attention", **tensors_of(batch))
    q_heads, kv_heads = heads
    b_seq_len = batch.b_seq_len
    requests = len(b_seq_len)
    wanted = cdiv(PROGRAMS, kv_heads)
    max_items = wanted + requests  # each request's last item may be shorter than the others
    found = Plan(
        items=b_seq_len.new_empty((max_items, ITEM_FIELDS.value)),
        arrivals=b_seq_len.new_empty((max_items, kv_heads)),
        partials=b_seq_len.new_empty((max_items, q_heads, dim), dtype=torch.float32),
        log_sums=b_seq_len.new_empty((max_items, q_heads), dtype=torch.float32),
        shared=shared,
    )
    _token_attention_plan_kernel[(1,)](
        batch.b_req_idx,
        batch.b_start_loc,
        b_seq_len,
        batch.b_ready_cache_len,
        None if shared is None else shared.b_shared_len,
        found.items,
        found.arrivals,
        requests,
        max_items,
        kv_heads,
        wanted,
        MIN_ITEM,
        BLOCK_N=block_n,
        BLOCK=few_sizes(requests),
    )
    return found
