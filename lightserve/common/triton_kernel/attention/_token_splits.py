"""The work list of token attention: each request's keys are split so that all multiprocessors stay busy.

A wave is as many programs as run at once. With many requests most are not split; only the requests left over after full
waves are, so that they fill a wave too. 204 requests of 1,025 to 1,150 tokens are 3.1 waves on an H200. Unsplit they
take 251 us, because the last few run alone for as long as those before them; split they take 225 us. If there are fewer
requests than a wave has programs, all may be split.

Keys that a window hides are not listed, nor are those of a shared prefix. The list is made on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel import _gpu
from lightserve.common.triton_kernel._blocks import few_sizes
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of

MIN_SPLIT = 64  # keys; a shorter split costs more to merge than to read
# int32 each: query row, row of req_to_token, begin, end, seq_len; the first split of the request and how many it has;
# if prefixes are shared, the request's place in the batch, or -1 if it shares none
SPLIT_FIELDS = tl.constexpr(8)
MAX_KEYS = 2**31 - 1  # of a request: int32
CLEARED = tl.constexpr(256)  # counters that are zeroed at once


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What all layers of a step share: the work list, and room for partial results."""

    splits: Tensor  # [max splits, SPLIT_FIELDS] int32; a row past the last split says 0 splits
    done_counts: Tensor  # [max splits, kv_heads] int32: finished splits, at a request's first one; 0 between launches
    partials: Tensor  # [max splits, heads, dim] float32
    log_sums: Tensor  # [max splits, heads] float32, base 2


@triton.jit
def _max_split_len(keys, slots, min_split):
    """A split length for which ``slots`` programs are enough. Requests of up to half that length are not counted.

    Twice the average number of keys per slot is always enough. The loop tries shorter lengths, down to that average.
    """
    share = tl.maximum(tl.cdiv(tl.sum(keys, axis=0), slots), min_split)
    longest = 2 * share
    for eighths in range(15, 7, -1):
        tried = share * eighths // 8
        large = tl.sum(tl.where(2 * keys > tried, tl.cdiv(keys, tried), 0), axis=0)
        longest = tl.where(large <= slots, tried, longest)
    return longest


@triton.jit
def _split_len(keys, wave, min_split, BLOCK_N: tl.constexpr):
    """The length of each request's splits, in whole tiles. All requests together have up to ``wave`` extra splits."""
    longest = _max_split_len(keys, wave, min_split)
    has_keys = (keys > 0).to(tl.int32)
    with_keys = tl.sum(has_keys, axis=0)
    left_over = tl.where(with_keys > wave, with_keys % wave, 0)
    is_left_over = (keys > 0) & (tl.cumsum(has_keys, axis=0) > with_keys - left_over)
    added = tl.sum(tl.where((keys > 0) & ~is_left_over, tl.cdiv(keys, longest) - 1, 0), axis=0)
    short = _max_split_len(tl.where(is_left_over, keys, 0), tl.maximum(wave - added, 1), min_split)
    longest = tl.where(is_left_over, tl.minimum(longest, short), longest)
    split_len = tl.cdiv(keys, tl.maximum(tl.cdiv(keys, longest), 1))  # all splits of a request are of one length
    return tl.maximum(tl.cdiv(split_len, BLOCK_N), 1) * BLOCK_N


@triton.jit
def _first_splits(count, split_len):
    """The place of each request's first split in the list. Long splits come first, so that the last to start are short.

    They are ordered only by quarters of the longest.
    """
    longest = tl.max(tl.where(count > 0, split_len, 0), axis=0)
    quarter = split_len * 4 // (longest + 1)
    listed = 0
    end = count
    for i in range(3, -1, -1):
        of_quarter = tl.where(quarter == i, count, 0)
        end = tl.where(quarter == i, listed + tl.cumsum(of_quarter, axis=0), end)
        listed += tl.sum(of_quarter, axis=0)
    return end - count


@triton.jit(do_not_specialize=["requests", "max_splits", "wave", "min_split", "window"])
def _token_attention_plan_kernel(
    b_req_idx_ptr,
    b_start_loc_ptr,
    b_seq_len_ptr,
    b_ready_cache_len_ptr,
    b_shared_len_ptr,
    splits_ptr,
    done_counts_ptr,
    requests,
    max_splits,
    kv_heads,
    wave,
    min_split,
    window,
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
    first_key = tl.maximum(keys - window, 0)
    shared_len = 0
    if b_shared_len_ptr is not None:
        shared_len = tl.load(b_shared_len_ptr + lanes, mask=is_request, other=0)
        first_key = shared_len
    keys -= first_key
    split_len = _split_len(keys, wave, min_split, BLOCK_N)
    count = tl.cdiv(keys, split_len)
    if b_shared_len_ptr is not None:
        count = tl.where(shared_len > 0, tl.maximum(count, 1), count)  # a split without keys merges the prefix

    first = _first_splits(count, split_len)
    for i in range(tl.max(count, axis=0)):
        split_ptrs = splits_ptr + (first + i) * SPLIT_FIELDS
        is_split = i < count
        tl.store(split_ptrs, query_row, mask=is_split)
        tl.store(split_ptrs + 1, req_idx, mask=is_split)
        tl.store(split_ptrs + 2, first_key + i * split_len, mask=is_split)
        tl.store(split_ptrs + 3, tl.minimum(first_key + (i + 1) * split_len, seq_len), mask=is_split)
        tl.store(split_ptrs + 4, seq_len, mask=is_split)
        tl.store(split_ptrs + 5, first, mask=is_split)
        tl.store(split_ptrs + 6, count, mask=is_split)
        if b_shared_len_ptr is not None:
            tl.store(split_ptrs + 7, tl.where(shared_len > 0, lanes, -1), mask=is_split)
    cells = tl.arange(0, CLEARED)
    for begin in range(tl.sum(count, axis=0), max_splits, CLEARED):
        tl.store(splits_ptr + (begin + cells) * SPLIT_FIELDS + 6, 0, mask=begin + cells < max_splits)
    for begin in range(0, max_splits * kv_heads, CLEARED):
        tl.store(done_counts_ptr + begin + cells, 0, mask=begin + cells < max_splits * kv_heads)


def plan_splits(
    batch: ops.AttnBatch,
    head_shape: tuple[int, int, int],
    block_n: int,
    programs_per_sm: int,
    window: int | None = None,
    b_shared_len: Tensor | None = None,
) -> SplitPlan:
    """List the splits of the requests that have one query row.

    ``head_shape``: heads of queries, of keys, and their dim; ``programs_per_sm``: programs that run side by side on a
    multiprocessor; ``window``: the last keys of each request that it sees; ``b_shared_len``: keys at the start of each
    request that another kernel attends to, not together with a window.
    """
    check_last_contiguous("token_attention", **tensors_of(batch))
    q_heads, kv_heads, dim = head_shape
    b_seq_len = batch.b_seq_len
    requests = len(b_seq_len)
    wave = max(_gpu.active.multiprocessors * programs_per_sm // kv_heads, 1)
    max_splits = wave + requests  # the last split of a request may be shorter
    plan = SplitPlan(
        splits=b_seq_len.new_empty((max_splits, SPLIT_FIELDS.value)),
        done_counts=b_seq_len.new_empty((max_splits, kv_heads)),
        partials=b_seq_len.new_empty((max_splits, q_heads, dim), dtype=torch.float32),
        log_sums=b_seq_len.new_empty((max_splits, q_heads), dtype=torch.float32),
    )
    _token_attention_plan_kernel[(1,)](
        batch.b_req_idx,
        batch.b_start_loc,
        b_seq_len,
        batch.b_ready_cache_len,
        b_shared_len,
        plan.splits,
        plan.done_counts,
        requests,
        max_splits,
        kv_heads,
        wave,
        MIN_SPLIT,
        MAX_KEYS if window is None else window,
        BLOCK_N=block_n,
        BLOCK=few_sizes(requests),
    )
    return plan
