"""Keys and values into their cache slots: one program a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous


@triton.jit
def _write_kv_kernel(
    kv_ptr,
    slots_ptr,
    cache_ptr,
    kv_token_stride,
    kv_head_stride,
    slots_stride,
    cache_slot_stride,
    cache_head_stride,
    n_heads,
    dim,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    cols = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (heads < n_heads) & (cols < dim)

    kv = tl.load(kv_ptr + token * kv_token_stride + heads * kv_head_stride + cols, mask=mask, other=0.0)
    tl.store(cache_ptr + slot * cache_slot_stride + heads * cache_head_stride + cols, kv, mask=mask)


@ops.write_kv.impl("triton")
def write_kv(kv: Tensor, slots: Tensor, kv_cache: Tensor) -> None:
    check_last_contiguous("write_kv", kv=kv, kv_cache=kv_cache)
    tokens, heads, dim = kv.shape
    if kv_cache.shape[1:] != kv.shape[1:]:
        raise ValueError(f"write_kv: a slot holds {tuple(kv_cache.shape[1:])}, a token has {(heads, dim)}")
    if tokens == 0:
        return
    _write_kv_kernel[(tokens,)](
        kv,
        slots,
        kv_cache,
        kv.stride(0),
        kv.stride(1),
        slots.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        heads,
        dim,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_DIM=triton.next_power_of_2(dim),
    )
