"""Top-k, top-p and min-p without a sort: one program a row searches each threshold among the bits of all floats.

Both thresholds are the smallest value with less than a limit strictly above it: for top-k fewer than k tokens, for
top-p less than p of the mass that top-k left. An int32 that orders as the float does makes 16 quarterings exact.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._vocab import BLOCK

WARPS = 16  # 256 rows of 151,936, top-p on an H200: 1.0 ms, with 8 warps 1.2, halving with 8 warps 2.0
LOWEST_KEY = tl.constexpr(-0x7F800001)  # the key of -inf


@triton.jit
def _load_block(row_ptr, first_col, n_cols, BLOCK: tl.constexpr):
    """Logits of a block and int32 keys in their order; 0.0 and -0.0 share a key. Past the end: -inf."""
    cols = first_col + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf"))
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return logits, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights_above(row_ptr, n_cols, key_1, key_2, key_3, peak, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens (COUNTS) or probability mass relative to the peak's, of what lies strictly above each key."""
    total_1 = tl.zeros([BLOCK], tl.float32)  # a sum a lane; float32 counts exactly to 2^24
    total_2 = tl.zeros([BLOCK], tl.float32)
    total_3 = tl.zeros([BLOCK], tl.float32)
    for first_col in range(0, n_cols, BLOCK):
        logits, keys = _load_block(row_ptr, first_col, n_cols, BLOCK)
        weights = tl.full([BLOCK], 1.0, tl.float32) if COUNTS else tl.exp(logits - peak)
        total_1 += tl.where(keys > key_1, weights, 0.0)
        total_2 += tl.where(keys > key_2, weights, 0.0)
        total_3 += tl.where(keys > key_3, weights, 0.0)
    return tl.sum(total_1, axis=0), tl.sum(total_2, axis=0), tl.sum(total_3, axis=0)


@triton.jit
def _smallest_key(row_ptr, n_cols, low, high, limit, peak, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key in ``low`` .. ``high`` with a weight below ``limit`` above it; ``high`` if none."""
    low = low.to(tl.int64)  # the distance of two int32 is none
    high = high.to(tl.int64)
    while low < high:
        quarter = tl.cdiv(high - low, 4)
        key_1 = low + quarter - 1
        key_2 = tl.minimum(key_1 + quarter, high)
        key_3 = tl.minimum(key_2 + quarter, high)
        above_1, above_2, above_3 = _weights_above(
            row_ptr, n_cols, key_1.to(tl.int32), key_2.to(tl.int32), key_3.to(tl.int32), peak, COUNTS, BLOCK
        )
        if above_2 < limit:
            low = tl.where(above_1 < limit, low, key_1 + 1)
            high = tl.where(above_1 < limit, key_1, key_2)
        else:
            low = tl.minimum(tl.where(above_3 < limit, key_2, key_3) + 1, high)
            high = tl.where(above_3 < limit, key_3, high)
    return low.to(tl.int32)


@triton.jit
def _cut_logits_kernel(logits_ptr, b_top_k_ptr, b_top_p_ptr, b_min_p_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    top_k = tl.maximum(tl.load(b_top_k_ptr + row), 1)
    top_p = tl.load(b_top_p_ptr + row)
    min_p = tl.load(b_min_p_ptr + row)

    peak = float("-inf")
    peak_key = LOWEST_KEY
    for first_col in range(0, n_cols, BLOCK):
        logits, keys = _load_block(row_ptr, first_col, n_cols, BLOCK)
        peak = tl.maximum(peak, tl.max(logits, axis=0))
        peak_key = tl.maximum(peak_key, tl.max(keys, axis=0))

    cut_key = tl.full([], LOWEST_KEY, tl.int32)
    if top_k < n_cols:
        cut_key = _smallest_key(row_ptr, n_cols, cut_key, peak_key, top_k, peak, True, BLOCK)
    if top_p < 1:
        below = cut_key - 1
        mass, _, _ = _weights_above(row_ptr, n_cols, below, below, below, peak, False, BLOCK)
        cut_key = _smallest_key(row_ptr, n_cols, cut_key, peak_key, top_p * mass, peak, False, BLOCK)

    min_p_end = peak + tl.log(min_p)
    for first_col in range(0, n_cols, BLOCK):
        logits, keys = _load_block(row_ptr, first_col, n_cols, BLOCK)
        cols = first_col + tl.arange(0, BLOCK)
        is_cut = (keys < cut_key) | (logits < min_p_end)
        tl.store(row_ptr + cols, float("-inf"), mask=is_cut & (cols < n_cols))


@ops.cut_logits.impl("triton")
def cut_logits(logits: Tensor, b_top_k: Tensor, b_top_p: Tensor, b_min_p: Tensor) -> None:
    check_last_contiguous("cut_logits", logits=logits, b_top_k=b_top_k, b_top_p=b_top_p, b_min_p=b_min_p)
    rows, vocab = logits.shape
    if rows == 0:
        return
    _cut_logits_kernel[(rows,)](logits, b_top_k, b_top_p, b_min_p, logits.stride(0), vocab, BLOCK, num_warps=WARPS)
