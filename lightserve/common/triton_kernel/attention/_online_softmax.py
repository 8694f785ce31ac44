"""Online softmax of a tile of query rows over the keys of a request, block by block. Scores are in base 2.

``softmax`` holds for each row the weighted sum of values so far, the highest score and the sum of weights. ``cache``
holds pointers to the head's keys, to its values and to the request's slots, and the stride of a slot; then the scales'
pointer or None, their stride of a slot or None, and the places of the head of keys and of values among them.
``slopes`` are ALiBi's or None, ``scale`` is the factor of the scores, ``softcap`` their cap or None. ``USE_ASM``: as in
``_kv_codes.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.triton_kernel.attention._attention import LOWEST, cap_scores
from lightserve.common.triton_kernel.attention._kv_codes import convert, load_scales, scale_scores, weights_of_codes


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
def empty_softmax(ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of no keys yet. The highest score is finite: a row may see no key of the first blocks."""
    acc = tl.zeros([ROWS, COLS], tl.float32)
    return acc, tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def _seen_keys(keys, q_positions, last_seen, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether each row sees each key: none past ``last_seen`` if ``CAUSAL``, and none outside of its window."""
    is_seen = None
    if CAUSAL:
        is_seen = keys[None, :] <= last_seen[:, None]
    if WINDOW is not None:
        is_inside = keys[None, :] > q_positions[:, None] - WINDOW
        if not CAUSAL:
            is_inside = is_inside & (keys[None, :] < q_positions[:, None] + WINDOW)
        is_seen = is_inside if is_seen is None else is_seen & is_inside
    return is_seen


@triton.jit
def first_block(position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The start of the first block of keys that the row at ``position``, or one after it, sees."""
    first = 0
    if WINDOW is not None:
        first = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _update(q, k, v, scales, softmax, keys, q_positions, is_seen, slopes, scale, softcap):
    """Add a block of keys. ``is_seen`` None: every row sees every key.

    ``scales``: those of the keys and of the values, and a stride, which is None if there are none.
    """
    acc, peak, total = softmax
    k_scales, v_scales, scale_stride = scales
    scores = scale_scores(tl.dot(q, tl.trans(k), input_precision="ieee"), k_scales, scale_stride)
    IS_SCALED: tl.constexpr = (slopes is not None) | (softcap is not None)
    if IS_SCALED:
        scores = cap_scores(scores * scale, softcap)
    if slopes is not None:
        scores += slopes[:, None] * (keys[None, :] - q_positions[:, None])
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    highest = tl.max(scores, axis=1)
    if not IS_SCALED:  # the scale is free inside the multiply-add of the exponent
        new_peak = tl.maximum(peak, highest * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
    else:
        new_peak = tl.maximum(peak, highest)
        weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    weights = weights_of_codes(weights, v_scales, scale_stride)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def _update_from_cache(
    q,
    softmax,
    cache,
    keys,
    is_key,
    q_positions,
    last_seen,
    slopes,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Gather a block of keys from the cache and add it. ``is_key``: the request has this key."""
    k_ptr, v_ptr, slots_ptr, slot_stride, scales_ptr, scale_stride, k_head, v_head = cache
    cols = tl.arange(0, q.shape[1])
    slots = tl.load(slots_ptr + keys, mask=is_key, other=0)
    rows = slots.to(tl.int64) * slot_stride
    k = convert(load_rows(k_ptr, rows, cols, is_key, DIM), q, USE_ASM)
    v = convert(load_rows(v_ptr, rows, cols, is_key, DIM), q, USE_ASM)
    k_scales = load_scales(scales_ptr, scale_stride, k_head, slots, is_key)
    v_scales = load_scales(scales_ptr, scale_stride, v_head, slots, is_key)
    scales = (k_scales, v_scales, scale_stride)
    is_seen = _seen_keys(keys, q_positions, last_seen, CAUSAL, WINDOW)
    if not CAUSAL:
        is_seen = is_key[None, :] if is_seen is None else is_seen & is_key[None, :]
    return _update(q, k, v, scales, softmax, keys, q_positions, is_seen, slopes, scale, softcap)


@triton.jit
def attend_cached_blocks(
    q,
    softmax,
    cache,
    begin,
    end,
    q_positions,
    slopes,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Attend to the cached tokens ``begin`` .. ``end``, in whole blocks. Without a window, every row sees all of them.

    The slots of a block are loaded one block ahead. Else the loads of keys would be issued too late to hide.
    """
    k_ptr, v_ptr, slots_ptr, slot_stride, scales_ptr, scale_stride, k_head, v_head = cache
    cols = tl.arange(0, q.shape[1])
    block = tl.arange(0, BLOCK_N)
    next_slots = tl.load(slots_ptr + begin + block, mask=begin + block < end, other=0)
    for start in range(begin, end, BLOCK_N):
        slots = next_slots
        rows = slots.to(tl.int64) * slot_stride
        keys = start + block
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        k = convert(load_rows(k_ptr, rows, cols, None, DIM), q, USE_ASM)
        v = convert(load_rows(v_ptr, rows, cols, None, DIM), q, USE_ASM)
        k_scales = load_scales(scales_ptr, scale_stride, k_head, slots, None)
        v_scales = load_scales(scales_ptr, scale_stride, v_head, slots, None)
        scales = (k_scales, v_scales, scale_stride)
        is_seen = _seen_keys(keys, q_positions, q_positions, False, WINDOW)
        softmax = _update(q, k, v, scales, softmax, keys, q_positions, is_seen, slopes, scale, softcap)
    return softmax


@triton.jit
def attend_cached_prefix(
    q,
    softmax,
    cache,
    begin,
    ready_len,
    q_positions,
    slopes,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Attend to the cached tokens ``begin`` .. ``ready_len``, if any, in blocks."""
    whole = ready_len // BLOCK_N * BLOCK_N
    softmax = attend_cached_blocks(
        q, softmax, cache, begin, whole, q_positions, slopes, scale, softcap, WINDOW, DIM, BLOCK_N, USE_ASM
    )
    if tl.maximum(begin, whole) < ready_len:
        keys = whole + tl.arange(0, BLOCK_N)
        is_key = keys < ready_len
        softmax = _update_from_cache(
            q,
            softmax,
            cache,
            keys,
            is_key,
            q_positions,
            q_positions,
            slopes,
            scale,
            softcap,
            False,
            WINDOW,
            DIM,
            USE_ASM,
        )
    return softmax


@triton.jit
def attend_cached_in_order(
    q,
    softmax,
    cache,
    begin,
    end,
    q_positions,
    last_seen,
    slopes,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Attend to the tokens ``begin`` .. ``end`` from the cache, in blocks that begin at the same positions in any step.

    A key that a row may not see has weight 0 and changes no sum. So every bit of a row is independent of its place in
    the tile and of the rows that follow.
    """
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        softmax = _update_from_cache(
            q,
            softmax,
            cache,
            keys,
            keys < end,
            q_positions,
            last_seen,
            slopes,
            scale,
            softcap,
            True,
            WINDOW,
            DIM,
            USE_ASM,
        )
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
    k_len,
    begin,
    end,
    q_tokens,
    last_seen,
    slopes,
    scale,
    softcap,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the new tokens ``begin`` .. ``end`` of the request, if any; ``begin`` is that of a block. Without a
    window, the blocks that every row sees whole, those before ``first_token`` or, if not causal, all, need no mask.

    A block that reaches past the request is loaded under a mask too: the rows of other requests may hold NaN.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    block = tl.arange(0, BLOCK_N)
    no_scales = (None, None, None)
    whole = k_len // BLOCK_N * BLOCK_N
    diagonal = first_token // BLOCK_N * BLOCK_N if CAUSAL else whole
    for start in range(begin, tl.minimum(end, diagonal) if CAUSAL else tl.minimum(end, whole), BLOCK_N):
        k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
        v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
        keys = start + block
        is_seen = _seen_keys(keys, q_tokens, q_tokens, False, WINDOW)
        softmax = _update(q, k, v, no_scales, softmax, keys, q_tokens, is_seen, slopes, scale, softcap)
    if CAUSAL:
        for start in range(tl.maximum(begin, diagonal), tl.minimum(end, whole), BLOCK_N):
            keys = start + block
            k = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, k_col, DIM, BLOCK_N, BLOCK_D)
            v = _load_block(kv_desc, kv_ptr, token_stride, start_loc + start, v_col, DIM, BLOCK_N, BLOCK_D)
            is_seen = _seen_keys(keys, q_tokens, last_seen, CAUSAL, WINDOW)
            softmax = _update(q, k, v, no_scales, softmax, keys, q_tokens, is_seen, slopes, scale, softcap)
    if tl.maximum(begin, whole) < end:
        keys = whole + block
        rows_ptr = kv_ptr + (start_loc + whole).to(tl.int64) * token_stride
        k = load_rows(rows_ptr + k_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        v = load_rows(rows_ptr + v_col, block * token_stride, tl.arange(0, BLOCK_D), keys < end, DIM)
        is_seen = _seen_keys(keys, q_tokens, last_seen, CAUSAL, WINDOW)
        if not CAUSAL:
            is_seen = (keys < end)[None, :] if is_seen is None else is_seen & (keys < end)[None, :]
        softmax = _update(q, k, v, no_scales, softmax, keys, q_tokens, is_seen, slopes, scale, softcap)
    return softmax
