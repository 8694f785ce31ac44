"""Keys and values are written to their cache slots: one program for each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous
from lightserve.common.triton_kernel.attention._kv_codes import parts_of, write_codes


@triton.jit
def _write_kv_kernel(
    kv_ptr,
    slots_ptr,
    cache_ptr,
    scales_ptr,
    kv_token_stride,
    slot_stride,
    scale_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    WIDTH: tl.constexpr = HEADS * DIM
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if scales_ptr is not None:
        kv, cached = kv_ptr + token * kv_token_stride, cache_ptr + slot * slot_stride
        write_codes(kv, cached, scales_ptr, slot, scale_stride, HEADS, DIM)
        return
    cols = tl.arange(0, triton.next_power_of_2(WIDTH))
    mask = cols < WIDTH

    kv = tl.load(kv_ptr + token * kv_token_stride + cols, mask=mask, other=0.0)
    tl.store(cache_ptr + slot * slot_stride + cols, kv, mask=mask)


@ops.write_kv.impl("triton")
def write_kv(kv: Tensor, slots: Tensor, kv_cache: ops.KvCache) -> None:
    cache, scales, scale_stride = parts_of(kv_cache)
    check_heads_side_by_side("write_kv", kv=kv, kv_cache=cache)
    check_last_contiguous("write_kv", slots=slots)
    tokens, heads, dim = kv.shape
    if cache.shape[1:] != kv.shape[1:]:
        raise ValueError(f"write_kv: a slot holds {tuple(cache.shape[1:])}, a token has {(heads, dim)}")
    if tokens == 0:
        return
    _write_kv_kernel[(tokens,)](
        kv, slots, cache, scales, kv.stride(0), cache.stride(0), scale_stride, HEADS=heads, DIM=dim
    )
