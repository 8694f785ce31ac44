"""The items of token attention: the keys of the requests, cut so that all multiprocessors are busy, on the device.

Programs that run at once are a wave. Of many requests, most stay whole: what is left over after full waves is cut, so
that it fills one too. 204 requests of 1,025 to 1,150 tokens are 3.1 waves on an H200; uncut they take 251 us, because
the last few run alone for as long as those before them, cut 225 us. Fewer requests than a wave may all be cut.

Of a request that shares a prefix, only the keys behind that count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import _card
from lightserve.common.triton_kernel._blocks import few_sizes
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of
from lightserve.common.triton_kernel._shared_prefix import SharedPlan

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


@triton.jit
def _longest_item(keys, slots, min_item):
    """How long items may be: of those that are over half as long, ``slots`` have room, and the others beside them.

    Twice the share of a slot is always enough, the share itself if lengths happen to fit.
    """
    share = tl.maximum(tl.cdiv(tl.sum(keys, axis=0), slots), min_item)
    longest = 2 * share
    for eighths in range(15, 7, -1):
        tried = share * eighths // 8
        large = tl.sum(tl.where(2 * keys > tried, tl.cdiv(keys, tried), 0), axis=0)
        longest = tl.where(large <= slots, tried, longest)
    return longest


@triton.jit
def _item_len(keys, wave, min_item, BLOCK_N: tl.constexpr):
    """How long the items of each request are, in whole tiles; no more than ``wave`` are added to one a request."""
    longest = _longest_item(keys, wave, min_item)
    has_keys = (keys > 0).to(tl.int32)
    with_keys = tl.sum(has_keys, axis=0)
    left_over = tl.where(with_keys > wave, with_keys % wave, 0)
    is_left_over = (keys > 0) & (tl.cumsum(has_keys, axis=0) > with_keys - left_over)
    added = tl.sum(tl.where((keys > 0) & ~is_left_over, tl.cdiv(keys, longest) - 1, 0), axis=0)
    short = _longest_item(tl.where(is_left_over, keys, 0), tl.maximum(wave - added, 1), min_item)
    longest = tl.where(is_left_over, tl.minimum(longest, short), longest)
    item_len = tl.cdiv(keys, tl.maximum(tl.cdiv(keys, longest), 1))  # a request's items are alike
    return tl.maximum(tl.cdiv(item_len, BLOCK_N), 1) * BLOCK_N


@triton.jit
def _places(count, item_len):
    """Where in the list each request's items begin: the longest come first, as what starts last should be short.

    In order by quarters of the longest only.
    """
    longest = tl.max(tl.where(count > 0, item_len, 0), axis=0)
    quarter = item_len * 4 // (longest + 1)
    listed = 0
    end = count
    for i in range(3, -1, -1):
        of_quarter = tl.where(quarter == i, count, 0)
        end = tl.where(quarter == i, listed + tl.cumsum(of_quarter, axis=0), end)
        listed += tl.sum(of_quarter, axis=0)
    return end - count


@triton.jit(do_not_specialize=["requests", "max_items", "wave", "min_item"])
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
    wave,
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
    item_len = _item_len(keys, wave, min_item, BLOCK_N)
    count = tl.cdiv(keys, item_len)
    if b_shared_len_ptr is not None:
        count = tl.where(shared_len > 0, tl.maximum(count, 1), count)  # one of no keys merges what is shared

    first = _places(count, item_len)
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
    batch: ops.AttnBatch,
    heads: tuple[int, int],
    dim: int,
    block_n: int,
    at_once: int,
    shared: SharedPlan | None = None,
) -> Plan:
    """List the items of the requests with one query row.

    ``heads``: of queries, of keys; ``at_once``: programs that run side by side on a multiprocessor.
    """
    check_last_contiguous("token_attention", **tensors_of(batch))
    q_heads, kv_heads = heads
    b_seq_len = batch.b_seq_len
    requests = len(b_seq_len)
    wave = max(_card.active.multiprocessors * at_once // kv_heads, 1)
    max_items = wave + requests  # each request's last item may be shorter than the others
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
        wave,
        MIN_ITEM,
        BLOCK_N=block_n,
        BLOCK=few_sizes(requests),
    )
    return found
