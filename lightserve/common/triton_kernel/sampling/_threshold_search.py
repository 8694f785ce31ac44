"""Exact search for the thresholds of top-k and top-p among unsorted tokens: a whole row, or those gathered from it.

Both thresholds are the smallest value that has less than a limit strictly above it: for top-k fewer than k tokens, for
top-p less than p of the mass that top-k left. Values are compared as integers of the same order, so the search is exact
to the bit. Masses are integers too: no sum depends on its order, so no threshold depends on where it was found.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-0x7F800001)  # the key of -inf
WAYS = tl.constexpr(16)  # keys that are tried in a round: a window of 20 bits takes 5 rounds
MASS_UNIT = tl.constexpr(2.0**40)  # the mass of a best token; 2^23 of them fit an int64


@triton.jit
def keys_of(logits):
    """int32 in the order of the floats; 0.0 and -0.0 share one."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def depths_of(logits, peak):
    """Distance below the best logit; 0 at the best even if it is infinite."""
    return tl.where(logits == peak, 0.0, peak - logits)


@triton.jit
def masses_of(depths):
    """int64, in units of 1 / MASS_UNIT; 0 if the depth is NaN."""
    return (tl.where(depths >= 0, tl.exp(-depths), 0.0) * MASS_UNIT).to(tl.int64)


@triton.jit
def _weights_above(source_ptr, length, keys, peak, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """Number (COUNTS) or mass of the tokens strictly above each of the keys: int64 [WAYS]."""
    totals = tl.zeros([WAYS, CHUNK], tl.int64)
    for first in range(0, length, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        logits = tl.load(source_ptr + lanes, mask=lanes < length, other=float("-inf"))
        weights = tl.full([CHUNK], 1, tl.int64) if COUNTS else masses_of(depths_of(logits, peak))
        is_above = (keys_of(logits)[None, :] > keys[:, None]) & (lanes < length)[None, :]
        totals += tl.where(is_above, weights[None, :], 0)
    return tl.sum(totals, axis=1)


@triton.jit
def _smallest_key(source_ptr, length, low, high, limit, peak, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """The smallest key in ``low`` .. ``high`` with less weight than ``limit`` above it. It exists if ``limit`` > 0.

    ``high`` must be at least the highest key of the source.
    """
    while low < high:
        step = tl.cdiv(high - low + 1, WAYS)
        keys = tl.minimum(low + step * (tl.arange(0, WAYS) + 1) - 1, high)
        above = _weights_above(source_ptr, length, keys.to(tl.int32), peak, COUNTS, CHUNK)
        low += step * tl.sum((above >= limit).to(tl.int64), axis=0)
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def _ends(source_ptr, length, CHUNK: tl.constexpr):
    """The lowest and the highest key, as int64: the difference of two int32 may overflow."""
    low = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
    high = tl.full([CHUNK], LOWEST_KEY, tl.int32)
    for first in range(0, length, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        keys = keys_of(tl.load(source_ptr + lanes, mask=lanes < length, other=float("-inf")))
        low = tl.where(lanes < length, tl.minimum(low, keys), low)
        high = tl.where(lanes < length, tl.maximum(high, keys), high)
    return tl.min(low, axis=0).to(tl.int64), tl.max(high, axis=0).to(tl.int64)


@triton.jit
def kth_largest_key(source_ptr, length, k, CHUNK: tl.constexpr):
    """The key of the value with the rank ``k`` of at least as many; equal values have ranks one after the other."""
    low, high = _ends(source_ptr, length, CHUNK)
    return _smallest_key(source_ptr, length, low, high, k, 0.0, True, CHUNK).to(tl.int32)


@triton.jit
def count_above(source_ptr, length, key, CHUNK: tl.constexpr):
    """How many values are strictly above the key."""
    total = tl.zeros([CHUNK], tl.int32)
    for first in range(0, length, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        values = tl.load(source_ptr + lanes, mask=lanes < length, other=float("-inf"))
        total += ((keys_of(values) > key) & (lanes < length)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def find_threshold(
    source_ptr, length, above_count, above_mass, below_mass, top_k, top_p, n_cols, peak, CHUNK: tl.constexpr
):
    """The lowest key that is kept, and whether it is exact: both thresholds are among the tokens of the source.

    ``above_count``, ``above_mass`` and ``below_mass``, int64, describe the tokens outside of the source, each of which
    is above or below all tokens in it.
    """
    low, high = _ends(source_ptr, length, CHUNK)
    is_sure = length > 0
    if top_k < n_cols:
        is_sure = is_sure & (above_count < top_k) & (top_k <= above_count + length)
        low = _smallest_key(source_ptr, length, low, high, top_k - above_count, peak, True, CHUNK)
        below_mass = below_mass * 0
    if top_p < 1:
        keys = tl.full([WAYS], 0, tl.int64) + low - 1
        inside = tl.max(_weights_above(source_ptr, length, keys.to(tl.int32), peak, False, CHUNK), axis=0)
        total = (above_mass + inside + below_mass).to(tl.float64)
        limit = tl.maximum(tl.ceil(top_p.to(tl.float64) * total).to(tl.int64), 1) - above_mass
        is_sure = is_sure & (limit > 0) & (limit <= inside)
        low = _smallest_key(source_ptr, length, low, high, limit, peak, False, CHUNK)
    return low.to(tl.int32), is_sure
