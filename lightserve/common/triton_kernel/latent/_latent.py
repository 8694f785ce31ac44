"""What the kernels of latent attention share. A query that is multiplied by the key part of ``kv_b`` is absorbed: its
products with the latents are those with the expanded keys, and the weighted sum of the latents expands to the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.triton_kernel.attention._online_softmax import load_rows


@triton.jit
def add_to_softmax(scores, v, softmax, is_seen, scale):
    """Add a block of values ``[N, D]`` to ``softmax``. ``scores`` ``[M, N]``; ``is_seen`` None: rows see all keys."""
    acc, peak, total = softmax
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def attend_latents(
    q,
    q_pe,
    softmax,
    cache,
    begin,
    end,
    q_positions,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the cached tokens ``begin`` .. ``end`` to the softmax of absorbed queries ``q`` ``[M, R]``, ``q_pe``.

    ``cache``: pointers to the latents and to the request's slots, and the stride of a slot. ``q_positions`` ``[M]``:
    rows see the keys up to their own; None: all of them. A latent is loaded once, as key and as value.
    """
    cache_ptr, slots_ptr, slot_stride = cache
    cols = tl.arange(0, q.shape[1])
    pe_cols = tl.arange(0, q_pe.shape[1])
    block = tl.arange(0, BLOCK_N)
    # The slots of a tile are loaded one tile ahead: Triton does not pipeline a load that needs another's result.
    next_slots = tl.load(slots_ptr + begin + block, mask=begin + block < end, other=0)
    for start in range(begin, end, BLOCK_N):
        rows = next_slots.to(tl.int64) * slot_stride
        keys = start + block
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        latents = load_rows(cache_ptr, rows, cols, keys < end, RANK).to(q.dtype)
        k_pe = load_rows(cache_ptr + RANK, rows, pe_cols, keys < end, ROPE).to(q.dtype)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores, input_precision="ieee")
        is_seen = (keys < end)[None, :] if q_positions is None else keys[None, :] <= q_positions[:, None]
        softmax = add_to_softmax(scores, latents, softmax, is_seen, scale)
    return softmax
