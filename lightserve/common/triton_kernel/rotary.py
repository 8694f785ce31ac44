"""Rotary position embedding in place: one program a token turns all its heads, of queries and of keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_last_contiguous


@triton.jit
def _rotate(x_ptr, head_stride, n_heads, cos, sin, half, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr):
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < n_heads) & (cols < half)
    low_ptrs = x_ptr + heads * head_stride + cols
    high_ptrs = low_ptrs + half

    low = tl.load(low_ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(high_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(low_ptrs, low * cos - high * sin, mask=mask)
    tl.store(high_ptrs, high * cos + low * sin, mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    cos_token_stride,
    sin_token_stride,
    q_heads,
    k_heads,
    half,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_HALF)[None, :]

    cos = tl.load(cos_ptr + token * cos_token_stride + cols, mask=cols < half, other=0.0)
    sin = tl.load(sin_ptr + token * sin_token_stride + cols, mask=cols < half, other=0.0)
    _rotate(q_ptr + token * q_token_stride, q_head_stride, q_heads, cos, sin, half, BLOCK_Q_HEADS, BLOCK_HALF)
    _rotate(k_ptr + token * k_token_stride, k_head_stride, k_heads, cos, sin, half, BLOCK_K_HEADS, BLOCK_HALF)


@ops.rotary.impl("triton")
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_last_contiguous("rotary", q=q, k=k, cos=cos, sin=sin)
    (tokens, q_heads, dim), k_heads, half = q.shape, k.shape[1], cos.shape[-1]
    if 2 * half > dim:
        raise ValueError(f"rotary: {half} angles turn {2 * half} elements, the heads have {dim}")
    if tokens == 0:
        return
    _rotary_kernel[(tokens,)](
        q,
        k,
        cos,
        sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos.stride(0),
        sin.stride(0),
        q_heads,
        k_heads,
        half,
        BLOCK_Q_HEADS=triton.next_power_of_2(q_heads),
        BLOCK_K_HEADS=triton.next_power_of_2(k_heads),
        BLOCK_HALF=triton.next_power_of_2(half),
    )
