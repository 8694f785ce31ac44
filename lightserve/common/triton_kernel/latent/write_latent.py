"""The norm of latents, rotary positions and the cache write in one pass: one program for each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous


@triton.jit
def _rotated(x_ptr, at, mask, cos, sin, HALF: tl.constexpr):
    """The elements ``at`` and those ``HALF`` behind them, rotated."""
    low = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    return (low * cos - high * sin).to(x_ptr.dtype.element_ty), (high * cos + low * sin).to(x_ptr.dtype.element_ty)


@triton.jit
def _write_latent_kernel(
    q_ptr,
    latent_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    cache_ptr,
    q_token_stride,
    latent_token_stride,
    cos_token_stride,
    sin_token_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cached = cache_ptr + tl.load(slots_ptr + token).to(tl.int64) * slot_stride
    latent = latent_ptr + token * latent_token_stride

    cols = tl.arange(0, triton.next_power_of_2(RANK))
    is_col = cols < RANK
    weight = tl.load(weight_ptr + cols, mask=is_col, other=0.0).to(tl.float32)
    x = tl.load(latent + cols, mask=is_col, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps) * weight).to(latent_ptr.dtype.element_ty)
    tl.store(latent + cols, normed, mask=is_col)
    tl.store(cached + cols, normed, mask=is_col)

    pairs = tl.arange(0, triton.next_power_of_2(HALF))
    is_pair = pairs < HALF
    cos = tl.load(cos_ptr + token * cos_token_stride + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * sin_token_stride + pairs, mask=is_pair, other=0.0)
    low, high = _rotated(latent + RANK, pairs, is_pair, cos, sin, HALF)
    for target in tl.static_range(2):
        row = latent if target == 0 else cached
        tl.store(row + RANK + pairs, low, mask=is_pair)
        tl.store(row + RANK + HALF + pairs, high, mask=is_pair)

    heads = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    q = q_ptr + token * q_token_stride + NOPE
    at = heads * (NOPE + 2 * HALF) + pairs[None, :]
    mask = (heads < HEADS) & is_pair[None, :]
    low, high = _rotated(q, at, mask, cos[None, :], sin[None, :], HALF)
    tl.store(q + at, low, mask=mask)
    tl.store(q + at + HALF, high, mask=mask)


@ops.write_latent.impl("triton")
def write_latent(
    q: Tensor, latent: Tensor, norm: ops.LatentNorm, angles: ops.RotaryAngles, slots: Tensor, latent_cache: Tensor
) -> None:
    check_heads_side_by_side("write_latent", q=q)
    check_last_contiguous("write_latent", latent=latent, latent_cache=latent_cache, weight=norm.weight)
    check_last_contiguous("write_latent", cos=angles.cos, sin=angles.sin, slots=slots)
    tokens, heads, dim = q.shape
    rank, half = norm.weight.shape[0], angles.cos.shape[1]
    if latent.shape[1] != rank + 2 * half or latent_cache.shape[1:] != (1, latent.shape[1]) or dim <= 2 * half:
        raise ValueError(
            f"write_latent: heads of q {(heads, dim)}, {latent.shape[1]} numbers a token, a norm of {rank}, {half} "
            f"angles and a cache of {tuple(latent_cache.shape[1:])} a token do not match"
        )
    if tokens == 0:
        return
    _write_latent_kernel[(tokens,)](
        q,
        latent,
        norm.weight,
        angles.cos,
        angles.sin,
        slots,
        latent_cache,
        q.stride(0),
        latent.stride(0),
        angles.cos.stride(0),
        angles.sin.stride(0),
        latent_cache.stride(0),
        norm.eps,
        HEADS=heads,
        NOPE=dim - 2 * half,
        HALF=half,
        RANK=rank,
    )
