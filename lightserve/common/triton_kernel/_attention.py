"""What both attentions share: the softmax over a range of a request's keys, tile by tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common.ops import AttnBatch
from lightserve.common.triton_kernel._check import check_last_contiguous, tensors_of

MIN_DOT = 16  # tl.dot takes no smaller side


@triton.jit
def attend(
    q,
    q_positions,
    alibi_slopes,
    slots_ptr,
    k_ptr,
    v_ptr,
    slot_stride,
    begin,
    end,
    dim,
    scale,
    BLOCK_N: tl.constexpr,
):
    """Fold the keys ``begin`` .. ``end`` of one request and one kv head into a running softmax, causally.

    ``q`` ``[M, D]``, ``q_positions`` ``[M]``, ``alibi_slopes`` ``[M]`` or None; ``slots_ptr`` is the request's row of
    req_to_token. Returns the weighted sum of the values, the largest score and the sum of the weights of each row of
    ``q``. Every row must see the first key: a row that has seen none would subtract -inf from -inf.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < end
        slots = tl.load(slots_ptr + keys, mask=is_key, other=0).to(tl.int64)
        # A masked V is 0, not what the slot holds: 0 * NaN is NaN, and a slot never written may hold one.
        k_mask = is_key[None, :] & (cols[:, None] < dim)
        k = tl.load(k_ptr + slots[None, :] * slot_stride + cols[:, None], mask=k_mask, other=0.0).to(q.dtype)
        v_mask = is_key[:, None] & (cols[None, :] < dim)
        v = tl.load(v_ptr + slots[:, None] * slot_stride + cols[None, :], mask=v_mask, other=0.0).to(q.dtype)

        distance = keys[None, :] - q_positions[:, None]
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if alibi_slopes is not None:
            scores += alibi_slopes[:, None] * distance
        scores = tl.where(is_key[None, :] & (distance <= 0), scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_peak[:, None])
        decay = tl.exp(peak - new_peak)
        acc = tl.dot(weights.to(v.dtype), v, acc=acc * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        peak = new_peak
    return acc, peak, total


def dot_block(size: int) -> int:
    """The smallest side of a dot's operand that holds ``size``."""
    block: int = triton.next_power_of_2(size)
    return max(MIN_DOT, block)


def check_attention(op: str, q: Tensor, kv_cache: Tensor, batch: AttnBatch) -> None:
    check_last_contiguous(op, q=q, kv_cache=kv_cache, **tensors_of(batch))
    heads, dim = q.shape[1:]
    if kv_cache.shape[2] != dim or 2 * heads % kv_cache.shape[1]:
        raise ValueError(
            f"{op}: {heads} heads of {dim} cannot share the cache's {kv_cache.shape[1] / 2:g} of {kv_cache.shape[2]}"
        )


def keys_a_tile(dtype: torch.dtype, block_d: int) -> int:
    """K and V tiles, doubled by the pipeline, must fit the 227 KiB of shared memory of an H200's multiprocessor."""
    return 32 if dtype == torch.float32 or block_d > 128 else 64
