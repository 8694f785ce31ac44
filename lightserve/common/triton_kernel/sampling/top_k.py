"""The largest or smallest values along any dimension, in order: programs sort chunks of a row, then their results.

A value and its place are one integer, whose order is that of values and, of equal ones, that of places. So all keys
differ, and the result does not depend on how a row was cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._blocks import cdiv, next_power_of_2
from lightserve.common.triton_kernel.sampling._threshold_search import keys_of

MAX_BLOCK = 1024  # keys that a program sorts; with 2048 and a top-k of 256, a kernel compiles for half a minute
KEYS_PER_WARP = 256  # 8 in each lane
NO_KEY = tl.constexpr(-(2**63))  # below the key of every value
KEY_OF_NAN = tl.constexpr(0x7FFFFFFF)
LOW_BITS = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _keys_with_places(values, places, LARGEST: tl.constexpr):
    """int64: the key of the value above the place, where the first place is the largest."""
    keys = tl.where(values == values, keys_of(values), KEY_OF_NAN)
    keys = keys if LARGEST else ~keys
    return (keys.to(tl.int64) << 32) | (LOW_BITS - places)


@triton.jit
def _top_k_kernel(
    x_ptr,
    sorted_ptr,
    best_ptr,
    values_ptr,
    places_ptr,
    length,
    inner_size,
    outer_stride,
    stride,
    inner_stride,
    k,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first ``WIDTH`` keys of one chunk of a row of ``x``, or of the keys in ``sorted_ptr`` if that is there.

    They go to ``best_ptr``, or, if the row has one chunk, their values and places to the result.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    outer, inner = row // inner_size, row % inner_size
    row_ptr = x_ptr + outer * outer_stride + inner * inner_stride
    lanes = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_lane = lanes < length
    if sorted_ptr is None:
        values = tl.load(row_ptr + lanes * stride, mask=is_lane, other=0.0).to(tl.float32)
        keys = tl.where(is_lane, _keys_with_places(values, lanes, LARGEST), NO_KEY)
    else:
        keys = tl.load(sorted_ptr + row * length + lanes, mask=is_lane, other=NO_KEY)

    best = tl.topk(keys, WIDTH)
    ranks = tl.arange(0, WIDTH)
    if best_ptr is not None:
        tl.store(best_ptr + (row * tl.num_programs(1) + chunk) * WIDTH + ranks, best)
    else:
        places = LOW_BITS - (best & LOW_BITS)
        is_in = ranks < k
        out = (outer * k + ranks) * inner_size + inner
        tl.store(values_ptr + out, tl.load(row_ptr + places * stride, mask=is_in, other=0.0), mask=is_in)
        tl.store(places_ptr + out, places, mask=is_in)


@ops.top_k.impl("triton")
def top_k(x: Tensor, k: int, dim: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    dim %= x.dim()
    if not 0 < k <= min(x.shape[dim], ops.MAX_TOP_K) or x.shape[dim] > ops.MAX_TOP_K_LENGTH:
        raise ValueError(
            f"top_k: k is {k} of {x.shape[dim]} values; it takes 1 to {ops.MAX_TOP_K}, of up to {ops.MAX_TOP_K_LENGTH}"
        )
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    places = torch.empty(shape, dtype=torch.int64, device=x.device)
    if not values.numel():
        return values, places
    view = x.reshape(x.shape[:dim].numel(), x.shape[dim], -1)  # a copy only if no three strides describe it
    width, length, inner_size = max(next_power_of_2(k), 2), x.shape[dim], view.shape[2]
    rows, keys = len(view) * inner_size, None
    while True:
        block = max(min(next_power_of_2(length), MAX_BLOCK), width)
        chunks = cdiv(length, block)
        best_keys = None if chunks == 1 else places.new_empty(rows, chunks * width)
        _top_k_kernel[(rows, chunks)](
            view,
            keys,
            best_keys,
            None if chunks > 1 else values,
            None if chunks > 1 else places,
            length,
            inner_size,
            *view.stride(),
            k,
            LARGEST=largest,
            WIDTH=width,
            BLOCK=block,
            num_warps=min(max(block // KEYS_PER_WARP, 1), 8),
        )
        if chunks == 1:
            return values, places
        keys, length = best_keys, chunks * width
