"""Keys of a request folded, block by block, into the running softmax of a tile's query rows; scores are in base 2.

``softmax`` is, of each row, the weighted sum of values so far, the highest score and the sum of weights. ``cache`` is
where in the KV cache the keys and the values of the head begin, where the request's slots do, and a slot's stride.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(ptr, offsets, cols, is_row, DIM: tl.constexpr):
    """``[rows, dim]`` padded with 0. A masked row is 0, not what lies there: 0 * NaN is NaN."""
    ptrs = ptr + offsets[:, None] + cols[None, :]
    mask = None
    if is_row is not None:
        mask = is_row[:, None]
    if cols.shape[0] > DIM:
        is_col = (cols < DIM)[None, :]
        mask = is_col if mask is None else mask & is_col
    return tl.load(ptrs) if mask is None else tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _fold(q, k, v, softmax, keys, q_positions, is_seen, slopes, scale):
    """``is_seen`` None: every row sees every key. Otherwise each must see one, of this block or of those before."""
    acc, peak, total = softmax
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if slopes is not None:
        scores = scores * scale + slopes[:, None] * (keys[None, :] - q_positions[:, None])
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    highest = tl.max(scores, axis=1)
    if slopes is None:  # the scale costs nothing inside the multiply-add of the exponent
        new_peak = tl.maximum(peak, highest * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
    else:
        new_peak = tl.maximum(peak, highest)
        weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def _fold_cached(
    q, softmax, cache, keys, is_key, q_positions, slopes, scale, IS_CAUSAL: tl.constexpr, DIM: tl.constexpr
):
    """A block of keys that is gathered from the cache; ``is_key`` None: the request has all of them.

    ``IS_CAUSAL``: a row sees no key past its own position.
    """
    k_ptr, v_ptr, slots_ptr, slot_stride = cache
    cols = tl.arange(0, q.shape[1])
    slots = tl.load(slots_ptr + keys) if is_key is None else tl.load(slots_ptr + keys, mask=is_key, other=0)
    slots = slots.to(tl.int64) * slot_stride
    k = load_rows(k_ptr, slots, cols, is_key, DIM).to(q.dtype)
    v = load_rows(v_ptr, slots, cols, is_key, DIM).to(q.dtype)
    is_seen = None
    if IS_CAUSAL:
        is_seen = keys[None, :] <= q_positions[:, None]
    elif is_key is not None:
        is_seen = is_key[None, :]
    return _fold(q, k, v, softmax, keys, q_positions, is_seen, slopes, scale)


@triton.jit
def fold_blocks(q, softmax, cache, begin, end, q_positions, slopes, scale, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cached tokens ``begin`` .. ``end``, whole blocks of them: every row sees them all.

    The slots of a block are loaded a block ahead: a load that waits for another's address would be issued so late that
    the products wait for it.
    """
    k_ptr, v_ptr, slots_ptr, slot_stride = cache
    cols = tl.arange(0, q.shape[1])
    block = tl.arange(0, BLOCK_N)
    next_slots = tl.load(slots_ptr + begin + block, mask=begin + block < end, other=0)
    for start in range(begin, end, BLOCK_N):
        slots = next_slots.to(tl.int64) * slot_stride
        keys = start + block
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        k = load_rows(k_ptr, slots, cols, None, DIM).to(q.dtype)
        v = load_rows(v_ptr, slots, cols, None, DIM).to(q.dtype)
        softmax = _fold(q, k, v, softmax, keys, q_positions, None, slopes, scale)
    return softmax


@triton.jit
def fold_prefix(q, softmax, cache, ready_len, q_positions, slopes, scale, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tokens that were in the cache before the step: every row sees them all."""
    whole = ready_len // BLOCK_N * BLOCK_N
    softmax = fold_blocks(q, softmax, cache, 0, whole, q_positions, slopes, scale, DIM, BLOCK_N)
    if whole < ready_len:
        keys = whole + tl.arange(0, BLOCK_N)
        softmax = _fold_cached(q, softmax, cache, keys, keys < ready_len, q_positions, slopes, scale, False, DIM)
    return softmax


@triton.jit
def fold_in_order(q, softmax, cache, end, q_positions, slopes, scale, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """All tokens from the cache, in blocks that begin at the same positions whatever the step computes.

    A key that a row may not see weighs 0 and changes no sum, so neither a row's place in its tile nor what follows it
    matters to a bit of the row.
    """
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        softmax = _fold_cached(q, softmax, cache, keys, keys < end, q_positions, slopes, scale, True, DIM)
    return softmax


@triton.jit
def _load_block(
    kv_desc, kv_ptr, token_stride, row, col, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``BLOCK_N`` rows of one head of the step's own tokens, by the copy engine where there is a descriptor."""
    if kv_desc is not None:
        return kv_desc.load([row, col])
    offsets = tl.arange(0, BLOCK_N) * token_stride  # inside a block: far from 2^31
    return load_rows(kv_ptr + row.to(tl.int64) * token_stride + col, offsets, tl.arange(0, BLOCK_D), None, DIM)


@triton.jit
def fold_own(
    q,
    softmax,
    kv_desc,
    kv_ptr,
    token_stride,
    start_loc,
    k_col,
    v_col,
    first_token,
    q_len,
    end,
    q_tokens,
    slopes,
    scale,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The step's own tokens of the request up to ``end``; only the blocks from ``first_token`` on need a mask.

    A block that reaches past the request is loaded under a mask too: the rows of others may hold NaN.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    block = tl.arange(0, BLOCK_N)
    diagonal = first_token // BLOCK_N * BLOCK_N
    whole = q_len // BLOCK_N * BLOCK_N
    for start in range(0, diagonal, BLOCK_N):
        k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
        v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
        softmax = _fold(q, k, v, softmax, start + block, q_tokens, None, slopes, scale)
    for start in range(diagonal, tl.minimum(end, whole), BLOCK_N):
        keys = start + block
        k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
        v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
        is_seen = keys[None, :] <= q_tokens[:, None]
        softmax = _fold(q, k, v, softmax, keys, q_tokens, is_seen, slopes, scale)
    if whole < end:
        keys = whole + block
        rows_ptr = kv_ptr + (start_loc + whole).to(tl.int64) * token_stride
        k = load_rows(rows_ptr + k_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        v = load_rows(rows_ptr + v_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        is_seen = keys[None, :] <= q_tokens[:, None]
        softmax = _fold(q, k, v, softmax, keys, q_tokens, is_seen, slopes, scale)
    return softmax
