"""The norm of latents, rotary positions and the cache write in one pass: one program for each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel._check import check_heads_side_by_side, check_last_contiguous
from lightserve.common.triton_kernel.attention._kv_codes import write_row
from lightserve.common.triton_kernel.latent._latent import parts_of


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
    cache_pe_ptr,
    scales_ptr,
    q_token_stride,
    latent_token_stride,
    cos_token_stride,
    sin_token_stride,
    slot_stride,
    slot_pe_stride,
    scale_stride,
    eps,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cached, cached_pe = cache_ptr + slot * slot_stride, cache_pe_ptr + slot * slot_pe_stride
    latent = latent_ptr + token * latent_token_stride

    cols = tl.arange(0, triton.next_power_of_2(RANK))
    is_col = cols < RANK
    weight = tl.load(weight_ptr + cols, mask=is_col, other=0.0).to(tl.float32)
    x = tl.load(latent + cols, mask=is_col, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps) * weight).to(latent_ptr.dtype.element_ty)
    tl.store(latent + cols, normed, mask=is_col)
    if scales_ptr is None:
        tl.store(cached + cols, normed, mask=is_col)
    else:
        write_row(normed.to(tl.float32), cached + cols, is_col, scales_ptr + slot * scale_stride)

    # no return inside of a branch: Triton compiles what follows it
    if cos_ptr is None:
        pe_cols = tl.arange(0, triton.next_power_of_2(2 * HALF))
        is_pe = pe_cols < 2 * HALF
        tl.store(cached_pe + pe_cols, tl.load(latent + RANK + pe_cols, mask=is_pe), mask=is_pe)
    else:
        pairs = tl.arange(0, triton.next_power_of_2(HALF))
        is_pair = pairs < HALF
        cos = tl.load(cos_ptr + token * cos_token_stride + pairs, mask=is_pair, other=0.0)
        sin = tl.load(sin_ptr + token * sin_token_stride + pairs, mask=is_pair, other=0.0)
        low, high = _rotated(latent + RANK, pairs, is_pair, cos, sin, HALF)
        for target in tl.static_range(2):
            row = latent + RANK if target == 0 else cached_pe
            tl.store(row + pairs, low, mask=is_pair)
            tl.store(row + HALF + pairs, high, mask=is_pair)

        heads = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
        q = q_ptr + token * q_token_stride + NOPE
        at = heads * (NOPE + 2 * HALF) + pairs[None, :]
        mask = (heads < HEADS) & is_pair[None, :]
        low, high = _rotated(q, at, mask, cos[None, :], sin[None, :], HALF)
        tl.store(q + at, low, mask=mask)
        tl.store(q + at + HALF, high, mask=mask)


@ops.write_latent.impl("triton")
def write_latent(
    q: Tensor,
    latent: Tensor,
    norm: ops.LatentNorm,
    angles: ops.RotaryAngles | None,
    slots: Tensor,
    latent_cache: ops.LatentCache,
) -> None:
    check_heads_side_by_side("write_latent", q=q)
    check_last_contiguous("write_latent", latent=latent, weight=norm.weight)
    cos, sin = (None, None) if angles is None else angles
    if cos is not None and sin is not None:
        check_last_contiguous("write_latent", cos=cos, sin=sin, slots=slots)
    tokens, heads, dim = q.shape
    rank = norm.weight.shape[0]
    half = (latent.shape[1] - rank) // 2 if cos is None else cos.shape[1]
    if latent.shape[1] != rank + 2 * half or latent_cache.shape[1:] != (1, latent.shape[1]) or dim <= 2 * half:
        raise ValueError(
            f"write_latent: heads of q {(heads, dim)}, {latent.shape[1]} numbers a token, a norm of {rank}, {half} "
            f"angles and a cache of {tuple(latent_cache.shape[1:])} a token do not match"
        )
    if tokens == 0:
        return
    cache = parts_of("write_latent", latent_cache, rank)
    _write_latent_kernel[(tokens,)](
        q,
        latent,
        norm.weight,
        cos,
        sin,
        slots,
        cache.latents,
        cache.key_parts,
        cache.scales,
        q.stride(0),
        latent.stride(0),
        None if cos is None else cos.stride(0),
        None if sin is None else sin.stride(0),
        cache.slot_stride,
        cache.pe_stride,
        cache.scale_stride,
        norm.eps,
        HEADS=heads,
        NOPE=dim - 2 * half,
        HALF=half,
        RANK=rank,
    )
