"""Top-k, top-p and min-p without a sort.

A histogram of each row predicts how far below the best logit the thresholds lie (``_threshold_window``). The tokens
near there are gathered, the others only summed. One program for each row then searches the exact thresholds among the
few thousand gathered tokens (``_threshold_search``). It detects a wrong prediction and then searches the whole row, so
the result never depends on the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.sampling._threshold_search import (
    LOWEST_KEY,
    depths_of,
    find_threshold,
    keys_of,
    masses_of,
)
from lightserve.common.triton_kernel.sampling._threshold_window import BINS, count_block, heavy_end, window_of

BLOCK = 2048  # as in sample: even one row is spread over the GPU
WARPS = 4
CAPACITY = 16384  # tokens gathered of a row
# Tokens that the search compares at once. 256 rows of 128,256 on an H200, top-p and with top-k: 524 and 478 us; with
# 1,024 tokens and 16 warps 560 and 520.
CHUNK = 512
SEARCH_WARPS = 8
ABOVE_COUNT = tl.constexpr(0)  # fields of the sums of a row
ABOVE_MASS = tl.constexpr(1)
BELOW_MASS = tl.constexpr(2)
GATHERED = tl.constexpr(3)
SUMS = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What one kernel leaves for the next. It is undefined for rows without top-k, top-p or min-p."""

    block_peaks: Tensor  # [rows, blocks] float32: the best logit
    block_masses: Tensor  # [rows, blocks] float32: in units of the block's best token
    histogram: Tensor  # [rows, BINS] int32: tokens by depth, estimated
    window: Tensor  # [rows, 2] float32: the depths between which tokens are gathered
    sums: Tensor  # [rows, SUMS] int64: of the tokens outside of the window; how many were gathered
    gathered: Tensor  # [rows, CAPACITY] float32: logits inside of the window that are not masked, in any order
    threshold_keys: Tensor  # [rows] int32: the lowest key that is kept

    @classmethod
    def of(cls, logits: Tensor, blocks: int) -> Scratch:
        rows = len(logits)
        return cls(
            block_peaks=logits.new_empty((rows, blocks)),
            block_masses=logits.new_empty((rows, blocks)),
            histogram=logits.new_empty((rows, BINS.value), dtype=torch.int32),
            window=logits.new_empty((rows, 2)),
            sums=logits.new_empty((rows, SUMS.value), dtype=torch.int64),
            gathered=logits.new_empty((rows, CAPACITY)),
            threshold_keys=logits.new_empty((rows,), dtype=torch.int32),
        )


@triton.jit
def _load_limits(b_top_k_ptr, b_top_p_ptr, row, n_cols):
    """``top_k``, ``top_p``, and whether there is a threshold to search for."""
    top_k = tl.maximum(tl.load(b_top_k_ptr + row), 1)
    top_p = tl.load(b_top_p_ptr + row)
    return top_k, top_p, (top_k < n_cols) | (top_p < 1)


@triton.jit
def _peak_of(block_peaks_ptr, row, blocks, BLOCKS: tl.constexpr):
    lanes = tl.arange(0, BLOCKS)
    peaks = tl.load(block_peaks_ptr + row * blocks + lanes, mask=lanes < blocks, other=float("-inf"))
    return tl.max(peaks, axis=0)


@triton.jit
def _top_k_top_p_min_p_peak_kernel(
    logits_ptr,
    b_top_k_ptr,
    b_top_p_ptr,
    b_min_p_ptr,
    block_peaks_ptr,
    block_masses_ptr,
    histogram_ptr,
    sums_ptr,
    row_stride,
    n_cols,
    BLOCK: tl.constexpr,
):
    """The best logit of each block and its mass; zeroes what the next kernels add to."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_limits(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if (not is_searched) & (tl.load(b_min_p_ptr + row) <= 0):
        return
    cols = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + cols, mask=cols < n_cols, other=float("-inf"))
    peak = tl.max(logits, axis=0)
    at = row * tl.num_programs(0) + block
    tl.store(block_peaks_ptr + at, peak)
    tl.store(block_masses_ptr + at, tl.sum(tl.where(logits > float("-inf"), tl.exp(logits - peak), 0.0), axis=0))
    if block == 0:
        tl.store(histogram_ptr + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(sums_ptr + row * SUMS + tl.arange(0, SUMS), tl.zeros([SUMS], tl.int64))


@triton.jit
def _top_k_top_p_min_p_count_kernel(
    logits_ptr,
    b_top_k_ptr,
    b_top_p_ptr,
    block_peaks_ptr,
    block_masses_ptr,
    histogram_ptr,
    row_stride,
    n_cols,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The histogram of each row. A program adds one block."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_limits(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if not is_searched:
        return
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, BLOCKS)
    block_peaks = tl.load(block_peaks_ptr + row * blocks + lanes, mask=lanes < blocks, other=float("-inf"))
    block_masses = tl.load(block_masses_ptr + row * blocks + lanes, mask=lanes < blocks, other=0.0)
    peak = tl.max(block_peaks, axis=0)
    heavy_depth = heavy_end(block_peaks, block_masses, peak)
    row_ptr = logits_ptr + row * row_stride
    count_block(histogram_ptr + row * BINS, row_ptr, block * BLOCK, n_cols, peak, heavy_depth, BLOCK)


@triton.jit
def _top_k_top_p_min_p_window_kernel(b_top_k_ptr, b_top_p_ptr, histogram_ptr, window_ptr, n_cols):
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, is_searched = _load_limits(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if not is_searched:
        return
    start, end = window_of(histogram_ptr + row * BINS, top_k, top_p, n_cols)
    tl.store(window_ptr + row * 2, start)
    tl.store(window_ptr + row * 2 + 1, end)


@triton.jit
def _top_k_top_p_min_p_gather_kernel(
    logits_ptr,
    b_top_k_ptr,
    b_top_p_ptr,
    block_peaks_ptr,
    window_ptr,
    sums_ptr,
    gathered_ptr,
    row_stride,
    n_cols,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Sum the tokens of a block outside of the window; gather those inside that are not masked, while there is room.

    A window without an end would hold all masked tokens, which under a grammar are most of the row.
    """
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_limits(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if not is_searched:
        return
    peak = _peak_of(block_peaks_ptr, row, tl.num_programs(0), BLOCKS)
    start = tl.load(window_ptr + row * 2)
    end = tl.load(window_ptr + row * 2 + 1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    is_token = cols < n_cols
    logits = tl.load(logits_ptr + row * row_stride + cols, mask=is_token, other=float("-inf"))
    depths = depths_of(logits, peak)
    masses = masses_of(depths)
    is_above = (depths < start) & is_token
    is_inside = (depths >= start) & (depths <= end) & (logits > float("-inf"))
    is_below = (depths > end) & is_token

    sums_ptr += row * SUMS
    count = tl.sum(is_above.to(tl.int64), axis=0)
    if count > 0:
        tl.atomic_add(sums_ptr + ABOVE_COUNT, count, sem="relaxed")
        tl.atomic_add(sums_ptr + ABOVE_MASS, tl.sum(tl.where(is_above, masses, 0), axis=0), sem="relaxed")
    tl.atomic_add(sums_ptr + BELOW_MASS, tl.sum(tl.where(is_below, masses, 0), axis=0), sem="relaxed")
    places = tl.cumsum(is_inside.to(tl.int32), axis=0)
    count = tl.max(places, axis=0)
    if count > 0:
        places += (tl.atomic_add(sums_ptr + GATHERED, count.to(tl.int64), sem="relaxed") - 1).to(tl.int32)
        tl.store(gathered_ptr + row * CAPACITY + places, logits, mask=is_inside & (places < CAPACITY))


@triton.jit
def _top_k_top_p_min_p_search_kernel(
    logits_ptr,
    b_top_k_ptr,
    b_top_p_ptr,
    block_peaks_ptr,
    window_ptr,
    sums_ptr,
    gathered_ptr,
    threshold_keys_ptr,
    row_stride,
    n_cols,
    blocks,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The lowest key that is kept of each row, searched among the gathered tokens, or else in the whole row."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, _ = _load_limits(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    sums_ptr += row * SUMS
    above_count = tl.load(sums_ptr + ABOVE_COUNT)
    length = tl.load(sums_ptr + GATHERED).to(tl.int32)
    is_rest_masked = tl.load(window_ptr + row * 2 + 1) == float("inf")
    top_k = tl.where(is_rest_masked & (top_k > above_count + length), n_cols, top_k)  # it drops only masked tokens
    if (top_k >= n_cols) & (top_p >= 1):  # a row without both may have read anything here
        tl.store(threshold_keys_ptr + row, LOWEST_KEY)
        return
    peak = _peak_of(block_peaks_ptr, row, blocks, BLOCKS)
    above_mass = tl.load(sums_ptr + ABOVE_MASS)
    below_mass = tl.load(sums_ptr + BELOW_MASS)
    source_ptr = gathered_ptr + row * CAPACITY

    threshold_key = tl.full([], LOWEST_KEY, tl.int32)
    is_sure = length < 0  # not yet
    if length <= CAPACITY:
        threshold_key, is_sure = find_threshold(
            source_ptr, length, above_count, above_mass, below_mass, top_k, top_p, n_cols, peak, CHUNK
        )
    if not is_sure:
        none = tl.zeros([], tl.int64)
        row_ptr = logits_ptr + row * row_stride
        threshold_key, _ = find_threshold(row_ptr, n_cols, none, none, none, top_k, top_p, n_cols, peak, CHUNK)
    tl.store(threshold_keys_ptr + row, threshold_key)


@triton.jit
def _top_k_top_p_min_p_write_kernel(
    logits_ptr,
    b_top_k_ptr,
    b_top_p_ptr,
    b_min_p_ptr,
    block_peaks_ptr,
    threshold_keys_ptr,
    row_stride,
    n_cols,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_limits(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    min_p = tl.load(b_min_p_ptr + row)
    if (not is_searched) & (min_p <= 0):
        return
    min_p_end = _peak_of(block_peaks_ptr, row, tl.num_programs(0), BLOCKS) + tl.log(min_p)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * row_stride
    logits = tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf"))
    is_dropped = (keys_of(logits) < tl.load(threshold_keys_ptr + row)) | (logits < min_p_end)
    tl.store(row_ptr + cols, float("-inf"), mask=is_dropped & (cols < n_cols))


@ops.top_k_top_p_min_p.impl("triton")
def top_k_top_p_min_p(logits: Tensor, b_top_k: Tensor, b_top_p: Tensor, b_min_p: Tensor) -> None:
    check_last_contiguous("top_k_top_p_min_p", logits=logits, b_top_k=b_top_k, b_top_p=b_top_p, b_min_p=b_min_p)
    rows, vocab = logits.shape
    if rows == 0:
        return
    blocks = cdiv(vocab, BLOCK)
    row_blocks = next_power_of_2(blocks)
    room = Scratch.of(logits, blocks)
    grid, given, row = (blocks, rows), (logits, b_top_k, b_top_p), (logits.stride(0), vocab)
    by_block = {"BLOCK": BLOCK, "BLOCKS": row_blocks, "num_warps": WARPS}
    _top_k_top_p_min_p_peak_kernel[grid](
        *given, b_min_p, room.block_peaks, room.block_masses, room.histogram, room.sums, *row, BLOCK, num_warps=WARPS
    )
    _top_k_top_p_min_p_count_kernel[grid](*given, room.block_peaks, room.block_masses, room.histogram, *row, **by_block)
    _top_k_top_p_min_p_window_kernel[(rows,)](b_top_k, b_top_p, room.histogram, room.window, vocab, num_warps=WARPS)
    _top_k_top_p_min_p_gather_kernel[grid](
        *given, room.block_peaks, room.window, room.sums, room.gathered, *row, CAPACITY, **by_block
    )
    _top_k_top_p_min_p_search_kernel[(rows,)](
        *given,
        room.block_peaks,
        room.window,
        room.sums,
        room.gathered,
        room.threshold_keys,
        *row,
        blocks,
        CAPACITY,
        CHUNK,
        row_blocks,
        num_warps=SEARCH_WARPS,
    )
    _top_k_top_p_min_p_write_kernel[grid](*given, b_min_p, room.block_peaks, room.threshold_keys, *row, **by_block)
