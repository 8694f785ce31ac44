"""Norms of heads, rotary positions and the cache write in one pass.

One program for each token normalises and rotates its heads, and stores K and V. A quantised cache needs the largest
number of each head first: the program then reads the rotated keys again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous
from lightserve.common.triton_kernel.attention._kv_codes import parts_of, write_codes


@triton.jit
def rotate(
    x_ptr,
    cache_ptr,
    norm_weight_ptr,
    eps,
    cos,
    sin,
    cols,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Normalise and rotate the heads of one token in place, and write them to the cache. None: no norm, no cache."""
    heads = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    mask = (heads < HEADS) & (cols < HALF)
    low_at = heads * DIM + cols
    high_at = low_at + HALF

    low = tl.load(x_ptr + low_at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + high_at, mask=mask, other=0.0).to(tl.float32)
    if norm_weight_ptr is not None:
        squares = tl.sum(low * low, axis=1, keep_dims=True) + tl.sum(high * high, axis=1, keep_dims=True)
        if 2 * HALF < DIM:
            squares = _norm_rest(x_ptr, norm_weight_ptr, eps, squares, HEADS, DIM, 2 * HALF)
        rstd = tl.rsqrt(squares / DIM + eps)
        low = _scale(low, rstd, norm_weight_ptr + cols, cols < HALF, x_ptr.dtype.element_ty)
        high = _scale(high, rstd, norm_weight_ptr + HALF + cols, cols < HALF, x_ptr.dtype.element_ty)
    turned_low = (low * cos - high * sin).to(x_ptr.dtype.element_ty)
    turned_high = (high * cos + low * sin).to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + low_at, turned_low, mask=mask)
    tl.store(x_ptr + high_at, turned_high, mask=mask)
    if cache_ptr is not None:
        tl.store(cache_ptr + low_at, turned_low, mask=mask)
        tl.store(cache_ptr + high_at, turned_high, mask=mask)


@triton.jit
def _scale(x, rstd, weight_ptrs, mask, DTYPE: tl.constexpr):
    """``x * rstd * weight``, rounded as the norm alone would round it."""
    weight = tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    return (x * rstd * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _norm_rest(x_ptr, norm_weight_ptr, eps, squares, HEADS: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr):
    """Normalise the elements from FIRST on, which do not rotate; the squares of all elements of each head."""
    heads = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    cols = FIRST + tl.arange(0, triton.next_power_of_2(DIM - FIRST))[None, :]
    mask = (heads < HEADS) & (cols < DIM)
    at = heads * DIM + cols
    rest = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    squares += tl.sum(rest * rest, axis=1, keep_dims=True)
    rstd = tl.rsqrt(squares / DIM + eps)
    tl.store(x_ptr + at, _scale(rest, rstd, norm_weight_ptr + cols, cols < DIM, x_ptr.dtype.element_ty), mask=mask)
    return squares


@triton.jit
def _copy(x_ptr, cache_ptr, HEADS: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr):
    """Copy the elements from FIRST on of every head."""
    heads = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    cols = FIRST + tl.arange(0, triton.next_power_of_2(DIM - FIRST))[None, :]
    mask = (heads < HEADS) & (cols < DIM)
    at = heads * DIM + cols
    tl.store(cache_ptr + at, tl.load(x_ptr + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def _rotary_write_kv_kernel(
    q_ptr,
    kv_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    cache_ptr,
    scales_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    q_token_stride,
    kv_token_stride,
    cos_token_stride,
    sin_token_stride,
    slot_stride,
    scale_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    k_cache = cache_ptr + slot * slot_stride
    q_row = q_ptr + token * q_token_stride
    k_row = kv_ptr + token * kv_token_stride
    cols = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    cos = tl.load(cos_ptr + token * cos_token_stride + cols, mask=cols < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * sin_token_stride + cols, mask=cols < HALF, other=0.0)

    rotate(q_row, None, q_norm_ptr, eps, cos, sin, cols, Q_HEADS, DIM, HALF)
    if scales_ptr is not None:
        rotate(k_row, None, k_norm_ptr, eps, cos, sin, cols, KV_HEADS, DIM, HALF)
        tl.debug_barrier()  # other threads have rotated the elements
        write_codes(k_row, k_cache, scales_ptr, slot, scale_stride, 2 * KV_HEADS, DIM)
        return
    rotate(k_row, k_cache, k_norm_ptr, eps, cos, sin, cols, KV_HEADS, DIM, HALF)
    if 2 * HALF < DIM:
        tl.debug_barrier()  # other threads may have normalised the elements
        _copy(k_row, k_cache, KV_HEADS, DIM, 2 * HALF)
    _copy(k_row + KV_HEADS * DIM, k_cache + KV_HEADS * DIM, KV_HEADS, DIM, 0)


@ops.rotary_write_kv.impl("triton")
def rotary_write_kv(q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_cache: ops.KvCache) -> None:
    _launch("rotary_write_kv", q, kv, None, ops.RotaryAngles(cos, sin), slots, kv_cache)


@ops.norm_rotary_write_kv.impl("triton")
def norm_rotary_write_kv(
    q: Tensor, kv: Tensor, norms: ops.HeadNorms, angles: ops.RotaryAngles, slots: Tensor, kv_cache: ops.KvCache
) -> None:
    _launch("norm_rotary_write_kv", q, kv, norms, angles, slots, kv_cache)


def _launch(
    op: str,
    q: Tensor,
    kv: Tensor,
    norms: ops.HeadNorms | None,
    angles: ops.RotaryAngles,
    slots: Tensor,
    kv_cache: ops.KvCache,
) -> None:
    cos, sin = angles
    cache, scales, scale_stride = parts_of(kv_cache)
    check_heads_side_by_side(op, q=q, kv=kv, kv_cache=cache)
    check_last_contiguous(op, cos=cos, sin=sin, slots=slots)
    tokens, q_heads, dim = q.shape
    half = cos.shape[1]
    if cache.shape[1:] != kv.shape[1:] or kv.shape[2] != dim or 2 * half > dim:
        raise ValueError(
            f"{op}: {half} angles, heads of q {(q_heads, dim)}, of kv {tuple(kv.shape[1:])} and of the "
            f"cache {tuple(cache.shape[1:])} do not match"
        )
    if tokens == 0:
        return
    _rotary_write_kv_kernel[(tokens,)](
        q,
        kv,
        cos,
        sin,
        slots,
        cache,
        scales,
        None if norms is None else norms.q_weight,
        None if norms is None else norms.k_weight,
        0.0 if norms is None else norms.eps,
        q.stride(0),
        kv.stride(0),
        cos.stride(0),
        sin.stride(0),
        cache.stride(0),
        scale_stride,
        Q_HEADS=q_heads,
        KV_HEADS=kv.shape[1] // 2,
        DIM=dim,
        HALF=half,
    )
