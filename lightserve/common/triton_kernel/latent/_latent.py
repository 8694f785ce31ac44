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
    convert_pairs,
    for_codes,
    load_scales,
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
def _weigh(scores, is_seen, scale, peak, total):
    """The weights of a block of values, the factor of the sums before it, the new peak and the new total."""
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    return weights, decay, new_peak, total * decay + tl.sum(weights, axis=1)


@triton.jit
def add_to_softmax(scores, v, softmax, is_seen, scale, v_scales=None, scale_stride=None):
    """Add a block of values ``[N, D]`` to ``softmax``. ``scores`` ``[M, N]``; ``is_seen`` None: rows see all keys."""
    acc, peak, total = softmax
    weights, decay, peak, total = _weigh(scores, is_seen, scale, peak, total)
    weights = weights_of_codes(weights, v_scales, scale_stride)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
    return acc, peak, total


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
    HAS_CODES: tl.constexpr = cache[3] is not None
    if HAS_CODES:
        softmax = _attend_codes(
            q, q_pe, softmax, cache, begin, end, q_positions, scale, RANK, ROPE, BLOCK_N, LOOP_STAGES, USE_ASM
        )
    else:
        softmax = _attend_numbers(
            q, q_pe, softmax, cache, begin, end, q_positions, scale, RANK, ROPE, BLOCK_N, LOOP_STAGES
        )
    return softmax


@triton.jit
def _attend_numbers(
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
):
    slots_ptr, cache_ptr, pe_ptr, _, slot_stride, pe_stride, _ = cache
    cols = tl.arange(0, q.shape[1])
    pe_cols = tl.arange(0, q_pe.shape[1])
    block = tl.arange(0, BLOCK_N)
    # The slots of a tile are loaded one tile ahead: Triton does not pipeline a load that needs another's result.
    next_slots = tl.load(slots_ptr + begin + block, mask=begin + block < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=LOOP_STAGES):
        slots = next_slots.to(tl.int64)
        keys = start + block
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        latents = load_rows(cache_ptr, slots * slot_stride, cols, keys < end, RANK)
        k_pe = load_rows(pe_ptr, slots * pe_stride, pe_cols, keys < end, ROPE).to(q_pe.dtype)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores, input_precision="ieee")
        is_seen = (keys < end)[None, :] if q_positions is None else keys[None, :] <= q_positions[:, None]
        softmax = add_to_softmax(scores, latents, softmax, is_seen, scale)
    return softmax


@triton.jit
def _attend_codes(
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
    """Two neighbouring codes are read as one number of 16 bits.

    So tensor cores get tiles from shared memory as they get those of float16, also transposed, and registers convert
    them: the first codes of all pairs are an operand of their own, and so are the second ones.
    """
    slots_ptr, cache_ptr, pe_ptr, scales_ptr, slot_stride, pe_stride, scale_stride = cache
    CODE: tl.constexpr = cache_ptr.dtype.element_ty
    acc, peak, total = softmax
    q, second_q = _split_pairs(for_codes(q, scales_ptr))
    acc, second_acc = _split_pairs(acc)
    pairs_ptr = cache_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    cols = tl.arange(0, q.shape[1])
    pe_cols = tl.arange(0, q_pe.shape[1])
    block = tl.arange(0, BLOCK_N)
    next_slots = tl.load(slots_ptr + begin + block, mask=begin + block < end, other=0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=LOOP_STAGES):
        slots = next_slots.to(tl.int64)
        keys = start + block
        next_slots = tl.load(slots_ptr + keys + BLOCK_N, mask=keys + BLOCK_N < end, other=0)
        pairs = load_rows(pairs_ptr, slots * (slot_stride // 2), cols, keys < end, RANK // 2)
        k_pe = load_rows(pe_ptr, slots * pe_stride, pe_cols, keys < end, ROPE).to(q_pe.dtype)
        scales = load_scales(scales_ptr, scale_stride, 0, slots, keys < end)
        first, second = convert_pairs(tl.trans(pairs), CODE, q.dtype, USE_ASM)
        scores = tl.dot(second_q, second, acc=tl.dot(q, first, input_precision="ieee"), input_precision="ieee")
        scores = tl.dot(q_pe, tl.trans(k_pe), acc=scores * scales[None, :], input_precision="ieee")
        is_seen = (keys < end)[None, :] if q_positions is None else keys[None, :] <= q_positions[:, None]
        weights, decay, peak, total = _weigh(scores, is_seen, scale, peak, total)
        weights = weights_of_codes(weights, scales, scale_stride).to(q.dtype)
        first, second = convert_pairs(pairs, CODE, q.dtype, USE_ASM)
        acc = tl.dot(weights, first, acc=acc * decay[:, None], input_precision="ieee")
        second_acc = tl.dot(weights, second, acc=second_acc * decay[:, None], input_precision="ieee")
    acc = tl.join(acc, second_acc).reshape(acc.shape[0], 2 * acc.shape[1])
    return acc * (1.0 / VALUE_FACTOR), peak, total


@triton.jit
def _split_pairs(x):
    """The columns 0, 2, 4 and 1, 3, 5."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
