"""What the kernels of latent attention share. A query that is multiplied by the key part of ``kv_b`` is absorbed: its
products with the latents are those with the expanded keys, and the weighted sum of the latents expands to the result.

The scale of a quantised latent is a factor of its scores and of its weight, as those of keys and values are: see
``_kv_codes.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous
from lightserve.common.triton_kernel.attention._kv_codes import (
    VALUE_FACTOR,
    convert,
    for_codes,
    load_scales,
    scale_scores,
    weights_of_codes,
)
from lightserve.common.triton_kernel.attention._online_softmax import load_rows


class LatentParts(NamedTuple):
    """A cache of latents as the kernels take it. Without scales the numbers are not quantised."""

    latents: Tensor  # [slots, 1, rank], or with the key parts behind
    key_parts: Tensor  # [slots, 1, rope]
    scales: Tensor | None  # [slots, 1]
    slot_stride: int
    pe_stride: int  # of a slot
    scale_stride: int | None  # of a slot; None: no scales

    def loop_stages(self, num_stages: int) -> int | None:
        """What a loop over latents must name: unnamed, Triton pipelines only loads that feed a dot, and no scales."""
        return None if self.scales is None else num_stages


def parts_of(op: str, latent_cache: ops.LatentCache, rank: int) -> LatentParts:
    if not isinstance(latent_cache, ops.QuantizedLatents):
        check_last_contiguous(op, latent_cache=latent_cache)
        stride = latent_cache.stride(0)
        return LatentParts(latent_cache, latent_cache[..., rank:], None, stride, stride, None)
    codes, scales, key_parts = latent_cache.codes, latent_cache.scales, latent_cache.key_parts
    check_last_contiguous(op, codes=codes, key_parts=key_parts)
    return LatentParts(codes, key_parts, scales, codes.stride(0), key_parts.stride(0), scales.stride(0))


@triton.jit
def add_to_softmax(scores, v, softmax, is_seen, scale, v_scales=None, scale_stride=None):
    """Add a block of values ``[N, D]`` to ``softmax``. ``scores`` ``[M, N]``; ``is_seen`` None: rows see all keys."""
    acc, peak, total = softmax
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    weights = weights_of_codes(weights, v_scales, scale_stride)
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
    LOOP_STAGES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Add the cached tokens ``begin`` .. ``end`` to the empty softmax of absorbed queries ``q`` ``[M, R]``, ``q_pe``.

    ``cache``: pointers to the request's slots, to the latents, key parts and scales, and the strides of a slot.
    ``q_positions`` ``[M]``: rows see the keys up to their own; None: all of them. A latent is loaded once, as key and
    as value.
    """
    slots_ptr, cache_ptr, pe_ptr, scales_ptr, slot_stride, pe_stride, scale_stride = cache
    q = for_codes(q, scales_ptr)
    cols = tl.arange(0, q.shape[1])
    pe_cols = tl.arange(0, q_pe.shape[1])
    block = tl.arange(0, BLOCK_N)
    # The slots of a tile are loaded one tile ahead: Triton does not pipeline a load that needs another's result.
    next_slots = tl.load(slots_ptr + begin + block, mask=begin + block < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=LOOP_STAGES):
        slots = next_slots.to(tl.int64)
        keys = start + block
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        latents = convert(load_rows(cache_ptr, slots * slot_stride, cols, keys < end, RANK), q, USE_ASM)
        k_pe = load_rows(pe_ptr, slots * pe_stride, pe_cols, keys < end, ROPE).to(q_pe.dtype)
        scales = load_scales(scales_ptr, scale_stride, 0, slots, keys < end)
        scores = scale_scores(tl.dot(q, tl.trans(latents), input_precision="ieee"), scales, scale_stride)
        scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores, input_precision="ieee")
        is_seen = (keys < end)[None, :] if q_positions is None else keys[None, :] <= q_positions[:, None]
        softmax = add_to_softmax(scores, latents, softmax, is_seen, scale, scales, scale_stride)
    acc, peak, total = softmax
    if scales_ptr is not None:
        acc *= 1.0 / VALUE_FACTOR
    return acc, peak, total
