"""Drafts from earlier n-grams: one program for each block of positions of a text finds the best one there, and one
program for each text takes the best of all blocks and copies what followed it.

A match is one number, ``length * columns + place``: the largest one is the longest n-gram, and of those the last one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, few_sizes, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous

BLOCK = 1024


@triton.jit(do_not_specialize=["best_stride", "first", "n_columns"])
def _find_kernel(
    token_ids_ptr,
    rows_ptr,
    begins_ptr,
    ends_ptr,
    best_ptr,
    token_ids_stride,
    best_stride,
    first,
    n_columns,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    block = tl.program_id(1)
    text_ptr = token_ids_ptr + tl.load(rows_ptr + req).to(tl.int64) * token_ids_stride
    begin = tl.load(begins_ptr + req)
    last = tl.load(ends_ptr + req) - 1
    places = block * BLOCK + tl.arange(0, BLOCK)
    columns = first + places
    is_before_end = (places < n_columns) & (columns < last)

    matches = is_before_end
    lengths = tl.zeros((BLOCK,), dtype=tl.int32)
    for back in range(MOST):
        wanted = tl.load(text_ptr + last - back, mask=last - back >= begin, other=-1)
        token = tl.load(text_ptr + columns - back, mask=is_before_end & (columns - back >= begin), other=-1)
        matches = matches & (token == wanted) & (token >= 0)
        lengths += matches.to(tl.int32)
    score = tl.where(lengths >= LEAST, lengths * n_columns + places, -1)
    tl.store(best_ptr + req.to(tl.int64) * best_stride + block, tl.max(score, axis=0))


@triton.jit(do_not_specialize=["best_stride", "first", "n_columns", "n_blocks", "n_drafts"])
def _copy_kernel(
    token_ids_ptr,
    rows_ptr,
    ends_ptr,
    best_ptr,
    drafts_ptr,
    token_ids_stride,
    best_stride,
    first,
    n_columns,
    n_blocks,
    n_drafts,
    BLOCKS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    text_ptr = token_ids_ptr + tl.load(rows_ptr + req).to(tl.int64) * token_ids_stride
    last = tl.load(ends_ptr + req) - 1
    blocks = tl.arange(0, BLOCKS)
    score = tl.max(tl.load(best_ptr + req * best_stride + blocks, mask=blocks < n_blocks, other=-1), axis=0)
    match = first + tl.maximum(score, 0) % n_columns
    numbers = tl.arange(0, DRAFTS)
    followers = match + 1 + numbers % tl.maximum(last - match, 1)
    mask = numbers < n_drafts
    drafts = tl.load(text_ptr + followers, mask=mask & (score >= 0), other=-1)
    tl.store(drafts_ptr + req * n_drafts + numbers, tl.maximum(drafts, -1).to(tl.int64), mask=mask)


@ops.ngram_drafts.impl("triton")
def ngram_drafts(texts: ops.DraftTexts, columns: tuple[int, int], sizes: ops.NgramSizes) -> Tensor:
    check_last_contiguous(
        "ngram_drafts", token_ids=texts.token_ids, rows=texts.rows, begins=texts.begins, ends=texts.ends
    )
    first, end = columns
    n_reqs, n_columns = len(texts.rows), end - first
    n_blocks = cdiv(n_columns, BLOCK)
    best = torch.empty((n_reqs, n_blocks), dtype=torch.int32, device=texts.rows.device)
    drafts = torch.empty((n_reqs, sizes.drafts), dtype=torch.int64, device=texts.rows.device)
    if not n_reqs:
        return drafts
    stride = texts.token_ids.stride(0)
    _find_kernel[(n_reqs, n_blocks)](
        texts.token_ids,
        texts.rows,
        texts.begins,
        texts.ends,
        best,
        stride,
        n_blocks,
        first,
        n_columns,
        sizes.least,
        sizes.most,
        BLOCK,
    )
    _copy_kernel[(n_reqs,)](
        texts.token_ids,
        texts.rows,
        texts.ends,
        best,
        drafts,
        stride,
        n_blocks,
        first,
        n_columns,
        n_blocks,
        sizes.drafts,
        few_sizes(n_blocks),
        next_power_of_2(sizes.drafts),
    )
    return drafts
