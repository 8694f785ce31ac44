"""A prediction of where the thresholds of top-k and top-p are, from a histogram of the row's tokens by depth.

The depth of a token is the distance of its logit below the best one. Every heavy token is counted. Of the others a
sample is counted, and a margin makes up for the error. A wrong window costs only time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.triton_kernel.sampling._threshold_search import depths_of

STRIDE = tl.constexpr(8)  # one token of so many is counted; tl.histogram costs more than to read them
HEAVY = tl.constexpr(4096)  # a token with more than 1 / HEAVY of the mass is heavy; a row has fewer than HEAVY of them
BINS = tl.constexpr(512)  # 32 an octave of the depth: 1/8 wide at 4, where the nucleus of a flat row ends
FIRST_EDGE = tl.constexpr((127 - 7) << 5)  # upper bits of 2^-7, where bin 1 begins; the last bin begins below 2^9
MARGIN = tl.constexpr(512.0)  # ranks on either side of the predicted one, beside DEVIATIONS of the sample
DEVIATIONS = tl.constexpr(5.0)


@triton.jit
def _bins(depths):
    """The bin of each depth: its exponent and five bits of its mantissa."""
    return tl.minimum(tl.maximum((depths.to(tl.int32, bitcast=True) >> 18) - FIRST_EDGE + 1, 0), BINS - 1)


@triton.jit
def _bin_starts(bins):
    return tl.where(bins > 0, ((bins - 1 + FIRST_EDGE) << 18).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def heavy_end(block_peaks, block_masses, peak):
    """The depth of a token that has 1 / HEAVY of the row's mass; ``block_masses`` are in units of their peaks."""
    return tl.log(HEAVY / tl.sum(block_masses * tl.exp(-depths_of(block_peaks, peak)), axis=0))


@triton.jit
def count_block(histogram_ptr, row_ptr, first_col, n_cols, peak, heavy_depth, BLOCK: tl.constexpr):
    """Add a block of a row to its histogram: each heavy token, and a sample of the others."""
    cols = first_col + tl.arange(0, BLOCK)
    depths = depths_of(tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf")), peak)
    is_heavy = (depths < heavy_depth) & (cols < n_cols)
    tl.atomic_add(histogram_ptr + _bins(depths), 1, mask=is_heavy, sem="relaxed")

    lanes = tl.arange(0, BLOCK // STRIDE)
    cols = first_col + lanes * STRIDE + lanes * 5 % STRIDE  # all residues: masked tokens may have a period
    depths = depths_of(tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf")), peak)
    is_light = (depths >= heavy_depth) & (cols < n_cols)
    counts = tl.histogram(_bins(depths), BINS, mask=is_light) * STRIDE
    tl.atomic_add(histogram_ptr + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _depth_of(rank, counts, before, widths):
    """The depth above which ``rank`` tokens lie, if the tokens of a bin are spread evenly."""
    depth = tl.sum(widths * tl.clamp((rank - before) / tl.maximum(counts, 1.0), 0.0, 1.0), axis=0)
    is_past_last_edge = rank > tl.max(before, axis=0)
    return tl.where(is_past_last_edge, float("inf"), depth)


@triton.jit
def _margin(rank, n_cols):
    share = tl.clamp(rank / n_cols, 0.0, 1.0)
    return MARGIN + DEVIATIONS * tl.sqrt(STRIDE * n_cols * share * (1.0 - share))


@triton.jit
def window_of(histogram_ptr, top_k, top_p, n_cols):
    """The depths between which the thresholds are predicted."""
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram_ptr + bins).to(tl.float32)
    before = tl.cumsum(counts, axis=0) - counts
    starts = _bin_starts(bins)
    widths = tl.where(bins < BINS - 1, _bin_starts(bins + 1) - starts, 0.0)

    top_k_counts = tl.minimum(tl.maximum(top_k - before, 0.0), counts)
    weights = tl.where(bins > 0, tl.maximum(tl.exp(-(starts + widths / 2)), 1e-30), 1.0)
    masses = top_k_counts * weights
    missing = top_p * tl.sum(masses, axis=0) - (tl.cumsum(masses, axis=0) - masses)
    nucleus = tl.sum(tl.minimum(tl.maximum(missing / weights, 0.0), top_k_counts), axis=0)

    first = tl.where(top_p < 1, nucleus, top_k.to(tl.float32))
    last = tl.where(top_k < n_cols, top_k.to(tl.float32), nucleus)
    first = tl.floor(first - _margin(first, n_cols))
    last = tl.ceil(last + _margin(last, n_cols))
    return _depth_of(first, counts, before, widths), _depth_of(last, counts, before, widths)
