"""The exact thresholds of top-k and top-p, searched among tokens in any order: a row, or what was gathered of it.

Both are the smallest value with less than a limit strictly above it: for top-k fewer than k tokens, for top-p less
than p of the mass that top-k left. Values are compared as integers in their order, so a search ends at the very bit.
Masses are integers too: no sum depends on its order, and so no threshold on where it was found.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-0x7F800001)  # the key of -inf
WAYS = tl.constexpr(16)  # keys that are tried at once: 20 bits between the ends of a window are 5 rounds
MASS_UNIT = tl.constexpr(2.0**40)  # the mass of a best token; 2^23 of them fit an int64


@triton.jit
def keys_of(logits):
    """int32 in the order of the floats; 0.0 and -0.0 share one."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def depths_of(logits, peak):
    """How far below the best; 0 at the best even where it is infinite."""
    return tl.where(logits == peak, 0.0, peak - logits)


@triton.jit
def masses_of(depths):
    """int64, in parts of MASS_UNIT; 0 of a depth that is no number."""
    return (tl.where(depths >= 0, tl.exp(-depths), 0.0) * MASS_UNIT).to(tl.int64)


@triton.jit
def _weights_above(source_ptr, length, keys, peak, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """Tokens (COUNTS) or their mass, strictly above each of the keys: int64 [WAYS]."""
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
    """The smallest key in ``low`` .. ``high`` with a weight below ``limit`` above it; there is one if that is positive.

    ``high`` must not be under the highest key of the source.
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
    """The lowest and the highest key, as int64: the distance of two int32 is none."""
    low = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
    high = tl.full([CHUNK], LOWEST_KEY, tl.int32)
    for first in range(0, length, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        keys = keys_of(tl.load(source_ptr + lanes, mask=lanes < length, other=float("-inf")))
        low = tl.where(lanes < length, tl.minimum(low, keys), low)
        high = tl.where(lanes < length, tl.maximum(high, keys), high)
    return tl.min(low, axis=0).to(tl.int64), tl.max(high, axis=0).to(tl.int64)


@triton.jit
def find_cut(source_ptr, length, above_count, above_mass, below_mass, top_k, top_p, n_cols, peak, CHUNK: tl.constexpr):
    """The lowest key that stays, and whether it is sure to be right: both thresholds lie among the source's tokens.

    ``above_count``, ``above_mass`` and ``below_mass``, int64, are of the tokens that are not in the source: each of
    them lies above or below all that are.
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
