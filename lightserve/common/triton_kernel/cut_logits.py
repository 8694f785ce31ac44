"""Top-k, top-p and min-p without a sort: blocks of each row by a program, and the rest in a window of a few thousand.

Both thresholds are the smallest value with less than a limit strictly above it: for top-k fewer than k tokens, for
top-p less than p of the mass that top-k left. A histogram, of a sample and of every heavy token, tells at which rank
they will lie. The tokens near that rank are gathered, the others only summed, and one program a row searches the exact
thresholds among the gathered. It knows when they are not there and then searches the row: what is kept never depends
on the estimate. Masses are integers, so neither does it on the order of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous

BLOCK = 2048  # as choose: even one row is spread over the card
WARPS = 4
STRIDE = tl.constexpr(8)  # one token of so many is sampled; tl.histogram costs more than to read them
HEAVY = tl.constexpr(4096)  # a token of more than this part of the mass is counted itself; there can be no more of them
BINS = tl.constexpr(512)  # 32 an octave of the depth: 1/8 wide at 4, where the nucleus of a flat row ends
FIRST_EDGE = tl.constexpr((127 - 7) << 5)  # upper bits of 2^-7, where bin 1 begins; the last begins below 2^9
MARGIN = tl.constexpr(512.0)  # ranks gathered on either side of the expected one, and five deviations of the sample
DEVIATIONS = tl.constexpr(5.0)
CAPACITY = 16384  # tokens gathered of a row
CHUNK = 1024  # tokens that the search compares at once
WAYS = tl.constexpr(16)  # keys that it tries at once: 20 bits between the ends of a window are 5 rounds
SEARCH_WARPS = 16
LOWEST_KEY = tl.constexpr(-0x7F800001)  # the key of -inf
MASS_UNIT = tl.constexpr(2.0**40)  # the mass of a best token; 2^23 of them fit an int64
ABOVE_COUNT = tl.constexpr(0)  # what the sums of a row hold
ABOVE_MASS = tl.constexpr(1)
BELOW_MASS = tl.constexpr(2)
GATHERED = tl.constexpr(3)
SUMS = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What one kernel leaves to the next."""

    block_peaks: Tensor  # [rows, blocks] float32: the best logit
    block_masses: Tensor  # [rows, blocks] float32: in units of the block's best token
    histogram: Tensor  # [rows, bins] int32: tokens by depth, estimated
    window: Tensor  # [rows, 2] float32: the depths between which tokens are gathered
    sums: Tensor  # [rows, SUMS] int64
    gathered: Tensor  # [rows, CAPACITY] float32 logits
    cut_keys: Tensor  # [rows] int32: the lowest key that stays

    @classmethod
    def of(cls, logits: Tensor, blocks: int) -> _Scratch:
        rows = len(logits)
        return cls(
            block_peaks=logits.new_empty((rows, blocks)),
            block_masses=logits.new_empty((rows, blocks)),
            histogram=logits.new_empty((rows, BINS.value), dtype=torch.int32),
            window=logits.new_empty((rows, 2)),
            sums=logits.new_empty((rows, SUMS.value), dtype=torch.int64),
            gathered=logits.new_empty((rows, CAPACITY)),
            cut_keys=logits.new_empty((rows,), dtype=torch.int32),
        )


@triton.jit
def _keys(logits):
    """int32 in the order of the floats; 0.0 and -0.0 share one."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _depths(logits, peak):
    """How far below the best; 0 at the best even where it is inf."""
    return tl.where(logits == peak, 0.0, peak - logits)


@triton.jit
def _masses(depths):
    """In fixed point: any order of addition has the same sum."""
    return (tl.where(depths >= 0, tl.exp(-depths), 0.0) * MASS_UNIT).to(tl.int64)


@triton.jit
def _bins(depths):
    """From the exponent and five bits of the mantissa."""
    return tl.minimum(tl.maximum((depths.to(tl.int32, bitcast=True) >> 18) - FIRST_EDGE + 1, 0), BINS - 1)


@triton.jit
def _bin_starts(bins):
    return tl.where(bins > 0, ((bins - 1 + FIRST_EDGE) << 18).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _load_row(b_top_k_ptr, b_top_p_ptr, row, n_cols):
    top_k = tl.maximum(tl.load(b_top_k_ptr + row), 1)
    top_p = tl.load(b_top_p_ptr + row)
    return top_k, top_p, (top_k < n_cols) | (top_p < 1)


@triton.jit
def _peak_of(block_peaks_ptr, row, blocks, BLOCKS: tl.constexpr):
    lanes = tl.arange(0, BLOCKS)
    peaks = tl.load(block_peaks_ptr + row * blocks + lanes, mask=lanes < blocks, other=float("-inf"))
    return tl.max(peaks, axis=0)


@triton.jit
def _cut_logits_peak_kernel(
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
    """The best of each block and its mass; clears what the next kernels add to."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_row(b_top_k_ptr, b_top_p_ptr, row, n_cols)
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
def _cut_logits_count_kernel(
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
    """Adds a block to the histogram of its row: each heavy token, and of the others a sample."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_row(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if not is_searched:
        return
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, BLOCKS)
    peak = _peak_of(block_peaks_ptr, row, blocks, BLOCKS)
    block_peaks = tl.load(block_peaks_ptr + row * blocks + lanes, mask=lanes < blocks, other=float("-inf"))
    block_masses = tl.load(block_masses_ptr + row * blocks + lanes, mask=lanes < blocks, other=0.0)
    heavy_end = tl.log(HEAVY / tl.sum(block_masses * tl.exp(-_depths(block_peaks, peak)), axis=0))

    row_ptr = logits_ptr + row * row_stride
    cols = block * BLOCK + tl.arange(0, BLOCK)
    depths = _depths(tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf")), peak)
    is_heavy = (depths < heavy_end) & (cols < n_cols)
    tl.atomic_add(histogram_ptr + row * BINS + _bins(depths), 1, mask=is_heavy, sem="relaxed")

    cols = block * BLOCK + tl.arange(0, BLOCK // STRIDE) * STRIDE
    depths = _depths(tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf")), peak)
    is_light = (depths >= heavy_end) & (cols < n_cols)
    counts = tl.histogram(_bins(depths), BINS, mask=is_light) * STRIDE
    tl.atomic_add(histogram_ptr + row * BINS + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _depth_of(rank, counts, before, widths):
    """Where so many tokens lie above, were those of each bin spread evenly."""
    depth = tl.sum(widths * tl.clamp((rank - before) / tl.maximum(counts, 1.0), 0.0, 1.0), axis=0)
    is_past_last_edge = rank > tl.max(before, axis=0)
    return tl.where(is_past_last_edge, float("inf"), depth)


@triton.jit
def _margin(rank, n_cols):
    share = tl.clamp(rank / n_cols, 0.0, 1.0)
    return MARGIN + DEVIATIONS * tl.sqrt(STRIDE * n_cols * share * (1.0 - share))


@triton.jit
def _cut_logits_window_kernel(b_top_k_ptr, b_top_p_ptr, histogram_ptr, window_ptr, n_cols):
    """Between which depths the thresholds of a row are to be expected."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, is_searched = _load_row(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if not is_searched:
        return
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram_ptr + row * BINS + bins).to(tl.float32)
    before = tl.cumsum(counts, axis=0) - counts
    starts = _bin_starts(bins)
    widths = tl.where(bins < BINS - 1, _bin_starts(bins + 1) - starts, 0.0)

    kept = tl.minimum(tl.maximum(top_k - before, 0.0), counts)
    weights = tl.where(bins > 0, tl.maximum(tl.exp(-(starts + widths / 2)), 1e-30), 1.0)
    masses = kept * weights
    missing = top_p * tl.sum(masses, axis=0) - (tl.cumsum(masses, axis=0) - masses)
    nucleus = tl.sum(tl.minimum(tl.maximum(missing / weights, 0.0), kept), axis=0)

    first = tl.where(top_p < 1, nucleus, top_k.to(tl.float32))
    last = tl.where(top_k < n_cols, top_k.to(tl.float32), nucleus)
    first = tl.floor(first - _margin(first, n_cols))
    last = tl.ceil(last + _margin(last, n_cols))
    tl.store(window_ptr + row * 2, _depth_of(first, counts, before, widths))
    tl.store(window_ptr + row * 2 + 1, _depth_of(last, counts, before, widths))


@triton.jit
def _cut_logits_gather_kernel(
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
    """Sums what a block has outside of the window, and gathers what is inside, in any order."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_row(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if not is_searched:
        return
    peak = _peak_of(block_peaks_ptr, row, tl.num_programs(0), BLOCKS)
    start = tl.load(window_ptr + row * 2)
    end = tl.load(window_ptr + row * 2 + 1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    is_token = cols < n_cols
    logits = tl.load(logits_ptr + row * row_stride + cols, mask=is_token, other=float("-inf"))
    depths = _depths(logits, peak)
    masses = _masses(depths)
    is_above = (depths < start) & is_token
    is_inside = (depths >= start) & (depths <= end) & is_token
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
def _weights_above(source_ptr, length, keys, peak, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """Tokens (COUNTS) or their mass, strictly above each of the keys: int64 [WAYS]."""
    totals = tl.zeros([WAYS, CHUNK], tl.int64)
    for first in range(0, length, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        logits = tl.load(source_ptr + lanes, mask=lanes < length, other=float("-inf"))
        weights = tl.full([CHUNK], 1, tl.int64) if COUNTS else _masses(_depths(logits, peak))
        is_above = (_keys(logits)[None, :] > keys[:, None]) & (lanes < length)[None, :]
        totals += tl.where(is_above, weights[None, :], 0)
    return tl.sum(totals, axis=1)


@triton.jit
def _smallest_key(source_ptr, length, low, high, limit, peak, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """The smallest key in ``low`` .. ``high`` with a weight below ``limit`` above it; one past ``high`` if none."""
    while low < high:
        step = tl.cdiv(high - low + 1, WAYS)
        keys = tl.minimum(low + step * (tl.arange(0, WAYS) + 1) - 1, high)
        above = _weights_above(source_ptr, length, keys.to(tl.int32), peak, COUNTS, CHUNK)
        low += step * tl.sum((above >= limit).to(tl.int64), axis=0)
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def _ends(source_ptr, length, CHUNK: tl.constexpr):
    """The lowest and the highest key, and the lowest as int64: the distance of two int32 is none."""
    low = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
    high = tl.full([CHUNK], LOWEST_KEY, tl.int32)
    for first in range(0, length, CHUNK):
        lanes = first + tl.arange(0, CHUNK)
        keys = _keys(tl.load(source_ptr + lanes, mask=lanes < length, other=float("-inf")))
        low = tl.where(lanes < length, tl.minimum(low, keys), low)
        high = tl.where(lanes < length, tl.maximum(high, keys), high)
    return tl.min(low, axis=0).to(tl.int64), tl.max(high, axis=0).to(tl.int64)


@triton.jit
def _search(source_ptr, length, above_count, above_mass, below_mass, top_k, top_p, n_cols, peak, CHUNK: tl.constexpr):
    """The lowest key that stays, and whether it is sure to be right: both thresholds lie among the source's tokens."""
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


@triton.jit
def _cut_logits_search_kernel(
    logits_ptr,
    b_top_k_ptr,
    b_top_p_ptr,
    block_peaks_ptr,
    sums_ptr,
    gathered_ptr,
    cut_keys_ptr,
    row_stride,
    n_cols,
    blocks,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, is_searched = _load_row(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    if not is_searched:
        tl.store(cut_keys_ptr + row, LOWEST_KEY)
        return
    peak = _peak_of(block_peaks_ptr, row, blocks, BLOCKS)
    sums_ptr += row * SUMS
    above_count = tl.load(sums_ptr + ABOVE_COUNT)
    above_mass = tl.load(sums_ptr + ABOVE_MASS)
    below_mass = tl.load(sums_ptr + BELOW_MASS)
    length = tl.load(sums_ptr + GATHERED).to(tl.int32)
    source_ptr = gathered_ptr + row * CAPACITY

    cut_key = tl.full([], LOWEST_KEY, tl.int32)
    is_sure = length < 0
    if length <= CAPACITY:
        cut_key, is_sure = _search(
            source_ptr, length, above_count, above_mass, below_mass, top_k, top_p, n_cols, peak, CHUNK
        )
    if not is_sure:
        none = tl.zeros([], tl.int64)
        cut_key, _ = _search(logits_ptr + row * row_stride, n_cols, none, none, none, top_k, top_p, n_cols, peak, CHUNK)
    tl.store(cut_keys_ptr + row, cut_key)


@triton.jit
def _cut_logits_write_kernel(
    logits_ptr,
    b_top_k_ptr,
    b_top_p_ptr,
    b_min_p_ptr,
    block_peaks_ptr,
    cut_keys_ptr,
    row_stride,
    n_cols,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, is_searched = _load_row(b_top_k_ptr, b_top_p_ptr, row, n_cols)
    min_p = tl.load(b_min_p_ptr + row)
    if (not is_searched) & (min_p <= 0):
        return
    min_p_end = _peak_of(block_peaks_ptr, row, tl.num_programs(0), BLOCKS) + tl.log(min_p)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * row_stride
    logits = tl.load(row_ptr + cols, mask=cols < n_cols, other=float("-inf"))
    is_cut = (_keys(logits) < tl.load(cut_keys_ptr + row)) | (logits < min_p_end)
    tl.store(row_ptr + cols, float("-inf"), mask=is_cut & (cols < n_cols))


@ops.cut_logits.impl("triton")
def cut_logits(logits: Tensor, b_top_k: Tensor, b_top_p: Tensor, b_min_p: Tensor) -> None:
    check_last_contiguous("cut_logits", logits=logits, b_top_k=b_top_k, b_top_p=b_top_p, b_min_p=b_min_p)
    rows, vocab = logits.shape
    if rows == 0:
        return
    blocks = triton.cdiv(vocab, BLOCK)
    scratch = _Scratch.of(logits, blocks)
    grid, of_row = (blocks, rows), (logits.stride(0), vocab)
    by_block = {"BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "num_warps": WARPS}
    _cut_logits_peak_kernel[grid](
        logits,
        b_top_k,
        b_top_p,
        b_min_p,
        scratch.block_peaks,
        scratch.block_masses,
        scratch.histogram,
        scratch.sums,
        *of_row,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    _cut_logits_count_kernel[grid](
        logits,
        b_top_k,
        b_top_p,
        scratch.block_peaks,
        scratch.block_masses,
        scratch.histogram,
        *of_row,
        **by_block,
    )
    _cut_logits_window_kernel[(rows,)](b_top_k, b_top_p, scratch.histogram, scratch.window, vocab, num_warps=WARPS)
    _cut_logits_gather_kernel[grid](
        logits,
        b_top_k,
        b_top_p,
        scratch.block_peaks,
        scratch.window,
        scratch.sums,
        scratch.gathered,
        *of_row,
        CAPACITY=CAPACITY,
        **by_block,
    )
    _cut_logits_search_kernel[(rows,)](
        logits,
        b_top_k,
        b_top_p,
        scratch.block_peaks,
        scratch.sums,
        scratch.gathered,
        scratch.cut_keys,
        *of_row,
        blocks,
        CAPACITY=CAPACITY,
        CHUNK=CHUNK,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=SEARCH_WARPS,
    )
    _cut_logits_write_kernel[grid](
        logits,
        b_top_k,
        b_top_p,
        b_min_p,
        scratch.block_peaks,
        scratch.cut_keys,
        *of_row,
        **by_block,
    )
