"""Top-k, top-p and min-p without a sort: one program a row finds each threshold by bisection over the floats' bits.

Both thresholds are the smallest value with less than a limit strictly above it: for top-k fewer than k tokens, for
top-p less than p of the mass that top-k left. An int32 that orders as the float does makes 32 halvings exact.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel._vocab import BLOCK, WARPS

LOWEST_KEY = tl.constexpr(-0x7F800001)  # the key of -inf


@triton.jit
def _load_block(row_ptr, first_col, n_cols, BLOCK: tl.constexpr):
    """Logits of a block and int32 keys in their order; 0.0 and -0.0 share a key. Past the end: -inf."""
    cols = first_col + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf"))
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return logits, bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight_above(row_ptr, n_cols, key, peak, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens (COUNTS) or probability mass relative to the peak's, of what lies strictly above ``key``."""
    total = tl.zeros([BLOCK], tl.float32)  # a sum a lane; float32 counts exactly to 2^24
    for first_col in range(0, n_cols, BLOCK):
        logits, keys = _load_block(row_ptr, first_col, n_cols, BLOCK)
        if COUNTS:
            total += tl.where(keys > key, 1.0, 0.0)
        else:
            total += tl.where(keys > key, tl.exp(logits - peak), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _smallest_key(row_ptr, n_cols, low, high, limit, peak, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key in ``low`` .. ``high`` with a weight below ``limit`` above it; ``high`` if none."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # rounds down and does not overflow
        if _weight_above(row_ptr, n_cols, middle, peak, COUNTS, BLOCK) < limit:
            high = middle
        else:
            low = middle + 1
    return low


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

    cut_key = LOWEST_KEY
    if top_k < n_cols:
        cut_key = _smallest_key(row_ptr, n_cols, cut_key, peak_key, top_k, peak, True, BLOCK)
    if top_p < 1:
        mass = _weight_above(row_ptr, n_cols, cut_key - 1, peak, False, BLOCK)
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
