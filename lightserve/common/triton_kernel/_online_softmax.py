"""Online softmax of a tile of query rows over the keys of a request, block by block. Scores are in base 2.

``softmax`` holds for each row the weighted sum of values so far, the highest score and the sum of weights. ``cache``
holds pointers to the head's keys, to its values and to the request's slots, and the stride of a slot.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(ptr, offsets, cols, is_row, DIM: tl.constexpr):
    """``[rows, dim]`` padded with 0. A masked row must be 0: memory may hold NaN, and 0 * NaN is NaN."""
    ptrs = ptr + offsets[:, None] + cols[None, :]
    mask = None
    if is_row is not None:
        mask = is_row[:, None]
    if cols.shape[0] > DIM:
        is_col = (cols < DIM)[None, :]
        mask = is_col if mask is None else mask & is_col
    return tl.load(ptrs) if mask is None else tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _update(q, k, v, softmax, keys, q_positions, is_seen, slopes, scale):
    """Add a block of keys. ``is_seen`` None: every row sees every key. Else each must have seen one by now."""
    acc, peak, total = softmax
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if slopes is not None:
        scores = scores * scale + slopes[:, None] * (keys[None, :] - q_positions[:, None])
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    highest = tl.max(scores, axis=1)
    if slopes is None:  # the scale is free inside the multiply-add of the exponent
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
def _update_from_cache(
    q, softmax, cache, keys, is_key, q_positions, slopes, scale, IS_CAUSAL: tl.constexpr, DIM: tl.constexpr
):
    """Gather a block of keys from the cache and add it. ``is_key`` None: the request has all of them.

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
    return _update(q, k, v, softmax, keys, q_positions, is_seen, slopes, scale)


@triton.jit
def attend_cached_blocks(
    q, softmax, cache, begin, end, q_positions, slopes, scale, DIM: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Attend to the cached tokens ``begin`` .. ``end``, in whole blocks. Every row sees all of them.

    The slots of a block are loaded one block ahead. Else the loads of keys would be issued too late to hide.
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
        softmax = _update(q, k, v, softmax, keys, q_positions, None, slopes, scale)
    return softmax


@triton.jit
def attend_cached_prefix(
    q, softmax, cache, ready_len, q_positions, slopes, scale, DIM: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Attend to the tokens that were in the cache before the step. Every row sees all of them."""
    whole = ready_len // BLOCK_N * BLOCK_N
    softmax = attend_cached_blocks(q, softmax, cache, 0, whole, q_positions, slopes, scale, DIM, BLOCK_N)
    if whole < ready_len:
        keys = whole + tl.arange(0, BLOCK_N)
        softmax = _update_from_cache(q, softmax, cache, keys, keys < ready_len, q_positions, slopes, scale, False, DIM)
    return softmax


@triton.jit
def attend_cached_in_order(
    q, softmax, cache, end, q_positions, slopes, scale, DIM: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Attend to all tokens from the cache, in blocks that begin at the same positions in every step.

    A key that a row may not see has weight 0 and changes no sum. So every bit of a row is independent of its place in
    the tile and of the rows that follow.
    """
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        softmax = _update_from_cache(q, softmax, cache, keys, keys < end, q_positions, slopes, scale, True, DIM)
    return softmax


@triton.jit
def _load_block(
    kv_desc, kv_ptr, token_stride, row, col, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """``BLOCK_N`` rows of one head of the step's new tokens. With a descriptor the copy engine (TMA) loads them."""
    if kv_desc is not None:
        return kv_desc.load([row, col])
    offsets = tl.arange(0, BLOCK_N) * token_stride  # within a block this is far below 2^31
    return load_rows(kv_ptr + row.to(tl.int64) * token_stride + col, offsets, tl.arange(0, BLOCK_D), None, DIM)


@triton.jit
def attend_new_tokens(
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
    """Attend to the new tokens of the request up to ``end``. Only the blocks from ``first_token`` on need a mask.

    A block that reaches past the request is loaded under a mask too: the rows of other requests may hold NaN.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    block = tl.arange(0, BLOCK_N)
    diagonal = first_token // BLOCK_N * BLOCK_N
    whole = q_len // BLOCK_N * BLOCK_N
    for start in range(0, diagonal, BLOCK_N):
        k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
        v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
        softmax = _update(q, k, v, softmax, start + block, q_tokens, None, slopes, scale)
    for start in range(diagonal, tl.minimum(end, whole), BLOCK_N):
        keys = start + block
        k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
        v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
        is_seen = keys[None, :] <= q_tokens[:, None]
        softmax = _update(q, k, v, softmax, keys, q_tokens, is_seen, slopes, scale)
    if whole < end:
        keys = whole + block
        rows_ptr = kv_ptr + (start_loc + whole).to(tl.int64) * token_stride
        k = load_rows(rows_ptr + k_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        v = load_rows(rows_ptr + v_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        is_seen = keys[None, :] <= q_tokens[:, None]
        softmax = _update(q, k, v, softmax, keys, q_tokens, is_seen, slopes, scale)
    return softmax
