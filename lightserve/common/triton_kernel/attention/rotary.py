"""Rotary positions without a cache, for encoders: one program for each token rotates its heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous
from lightserve.common.triton_kernel.attention.rotary_write_kv import rotate


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_token_stride,
    k_token_stride,
    cos_token_stride,
    sin_token_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    cos = tl.load(cos_ptr + token * cos_token_stride + cols, mask=cols < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * sin_token_stride + cols, mask=cols < HALF, other=0.0)

    rotate(q_ptr + token * q_token_stride, None, None, 0.0, cos, sin, cols, Q_HEADS, DIM, HALF)
    if K_HEADS > 0:
        rotate(k_ptr + token * k_token_stride, None, None, 0.0, cos, sin, cols, K_HEADS, DIM, HALF)


@ops.rotary.impl("triton")
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_heads_side_by_side("rotary", q=q, k=k)
    check_last_contiguous("rotary", cos=cos, sin=sin)
    tokens, q_heads, dim = q.shape
    half = cos.shape[1]
    if k.shape[2] != dim or 2 * half > dim:
        raise ValueError(f"rotary: {half} angles, heads of q of {dim} and of k of {k.shape[2]} do not match")
    if tokens == 0:
        return
    _rotary_kernel[(tokens,)](
        q,
        k,
        cos,
        sin,
        q.stride(0),
        k.stride(0),
        cos.stride(0),
        sin.stride(0),
        Q_HEADS=q_heads,
        K_HEADS=k.shape[1],
        DIM=dim,
        HALF=half,
    )
