"""KV caches of 8-bit codes: how kernels write them, convert them and apply their scales.

float8 has a fixed scale for each head: the keys' is a factor of the scores and the values' one of the result. int8 has
a scale for each token and head: the keys' are factors of columns of the scores, and the values' of the weights. So no
scale is applied to a key or a value itself. Codes are converted to float16, also for queries in bfloat16: the GPU
converts float8 to it in one instruction, and it holds all codes exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops.kv_cache import FLOAT8_MAX, INT8_MAX, MIN_ABSMAX

_FLOAT8_MAX = tl.constexpr(FLOAT8_MAX)
_INT8_MAX = tl.constexpr(INT8_MAX)
_MIN_ABSMAX = tl.constexpr(MIN_ABSMAX)
_ROUND = tl.constexpr(1.5 * 2**23)  # a float32 plus this number, minus it, is rounded to the nearest integer
# Triton's interpreter loses the carry of numbers that it rounds up to float8, so they are rounded before.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# The weights of values are multiplied by their scales, about 0.01, and then rounded to float16. This factor keeps them
# above its smallest normal number; values up to 30,000 are still below its largest.
VALUE_FACTOR = tl.constexpr(256.0)
# int8 is converted by byte permutations. With a plain conversion, attention of 256 requests of 1,150 tokens takes 298
# us on an H200, with permutations 217, in bfloat16 287.
_INT8_TO_FLOAT16 = tl.constexpr("""
{
    .reg .b32 biased, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 biased, $2, 0x80808080;
    prmt.b32 $0, biased, 0x64646464, 0x5140;
    prmt.b32 $1, biased, 0x64646464, 0x5342;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
}
""")

# Of two pairs of codes in a register, the first ones of both pairs and the second ones.
_FLOAT8_PAIRS = tl.constexpr("""
{
    .reg .b32 sorted;
    .reg .b16 first, second;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {first, second}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}
""")
_INT8_PAIRS = tl.constexpr(_INT8_TO_FLOAT16.value.replace("0x5140", "0x4240").replace("0x5342", "0x4341"))


class CacheParts(NamedTuple):
    """A cache as the kernels take it. Without scales the numbers are not quantised."""

    numbers: Tensor  # [slots, 2 * kv_heads, dim]
    scales: Tensor | None
    scale_stride: int | None  # of a slot; None: the scales are those of heads


def parts_of(kv_cache: ops.KvCache) -> CacheParts:
    if not isinstance(kv_cache, ops.QuantizedKv):
        return CacheParts(kv_cache, None, None)
    if kv_cache.scales.stride(-1) != 1:
        raise ValueError(f"the scales of a KV cache must be contiguous, found strides {kv_cache.scales.stride()}")
    return CacheParts(kv_cache.codes, kv_cache.scales, kv_cache.scales.stride(0) if kv_cache.has_token_scales else None)


@triton.jit
def _round_to_float8(x):
    """To four bits, and near 0 to multiples of 2^-9: what e4m3 can store."""
    high = x * (2.0**20 + 1)
    return tl.where(tl.abs(x) < 2.0**-6, x + 1.5 * 2.0**14 - 1.5 * 2.0**14, high - (high - x))


@triton.jit
def write_codes(kv_ptr, codes_ptr, scales_ptr, slot, scale_stride, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Quantise the keys and values ``[HEADS, DIM]`` of one token. ``codes_ptr`` is that of the slot."""
    heads = tl.arange(0, triton.next_power_of_2(HEADS))
    cols = tl.arange(0, triton.next_power_of_2(DIM))
    is_head = heads < HEADS
    at = heads[:, None] * DIM + cols[None, :]
    mask = is_head[:, None] & (cols < DIM)[None, :]
    x = tl.load(kv_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if scale_stride is None:
        scales = tl.load(scales_ptr + heads, mask=is_head, other=1.0)
        codes = tl.clamp(x / scales[:, None], -_FLOAT8_MAX, _FLOAT8_MAX, propagate_nan=tl.PropagateNan.ALL)
        if _IS_INTERPRETED:
            codes = _round_to_float8(codes)
    else:
        absmax = tl.maximum(tl.max(tl.abs(x), axis=1), _MIN_ABSMAX)
        codes = x / absmax[:, None] * _INT8_MAX + _ROUND - _ROUND
        tl.store(scales_ptr + slot * scale_stride + heads, absmax / _INT8_MAX, mask=is_head)
    tl.store(codes_ptr + at, codes.to(codes_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_row(x, codes_ptrs, mask, scale_ptr):
    """Quantise the float32 numbers ``x`` ``[n]``, 0 where ``mask`` is not set, with a scale of their own."""
    IS_INT8: tl.constexpr = codes_ptrs.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = _INT8_MAX if IS_INT8 else _FLOAT8_MAX
    absmax = tl.maximum(tl.max(tl.abs(x), axis=0), _MIN_ABSMAX)
    codes = x / absmax * LARGEST
    if IS_INT8:
        codes = codes + _ROUND - _ROUND
    elif _IS_INTERPRETED:
        codes = _round_to_float8(codes)
    tl.store(scale_ptr, absmax / LARGEST)
    tl.store(codes_ptrs, codes.to(codes_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def for_codes(q, scales_ptr):
    """The queries in the dtype in which they are multiplied with cached keys."""
    IS_CONVERTED: tl.constexpr = (scales_ptr is not None) and (q.dtype == tl.bfloat16)
    return q.to(tl.float16) if IS_CONVERTED else q


@triton.jit
def convert(numbers, q, USE_ASM: tl.constexpr):
    """Cached numbers in the dtype of ``q``. ``USE_ASM``: int8 is converted by assembly."""
    IS_PERMUTED: tl.constexpr = USE_ASM and (numbers.dtype == tl.int8) and (q.dtype == tl.float16)
    return permute_bytes(numbers) if IS_PERMUTED else numbers.to(q.dtype)


@triton.jit
def convert_pairs(pairs, CODE: tl.constexpr, dtype: tl.constexpr, USE_ASM: tl.constexpr):
    """The first and the second codes of ``pairs``, int16, in ``dtype``. ``CODE``: their own dtype."""
    if USE_ASM and dtype == tl.float16:
        ASM: tl.constexpr = _INT8_PAIRS if tl.int8 == CODE else _FLOAT8_PAIRS
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:  # noqa: RET505  a constexpr condition needs its else
        first = (pairs & 0xFF).to(tl.uint8).to(CODE, bitcast=True)
        second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(CODE, bitcast=True)
        return first.to(dtype), second.to(dtype)


@triton.jit
def permute_bytes(codes):
    """The bytes 0x64 and n are 1024 + n in float16; n is code + 128, and 0x6480 is 1024 + 128."""
    return tl.inline_asm_elementwise(_INT8_TO_FLOAT16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def score_factor(scale, cache):
    """The factor of the products of queries and cached numbers. ``cache`` as in ``_online_softmax.py``."""
    _, _, _, _, scales_ptr, scale_stride, k_head, _ = cache
    HAS_HEAD_SCALES: tl.constexpr = (scales_ptr is not None) and (scale_stride is None)
    return scale * tl.load(scales_ptr + k_head) if HAS_HEAD_SCALES else scale


@triton.jit
def scale_values(acc, cache):
    """The weighted sum of cached values from that of their numbers."""
    _, _, _, _, scales_ptr, scale_stride, _, v_head = cache
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + v_head) if scale_stride is None else 1.0 / VALUE_FACTOR
    return acc


@triton.jit
def load_scales(scales_ptr, scale_stride, head, slots, is_key):
    """Of one head in these slots, ``[keys]``. ``is_key`` None: all are keys. Unused if tokens have no scales."""
    scales = slots
    if scale_stride is not None:
        ptrs = scales_ptr + slots.to(tl.int64) * scale_stride + head
        scales = tl.load(ptrs) if is_key is None else tl.load(ptrs, mask=is_key, other=0.0)
    return scales


@triton.jit
def scale_scores(products, k_scales, scale_stride):
    """The products of queries and keys, from those of queries and their numbers."""
    return products if scale_stride is None else products * k_scales[None, :]


@triton.jit
def weights_of_codes(weights, v_scales, scale_stride):
    """The factors of the numbers of values; ``scale_values`` corrects their sum."""
    return weights if scale_stride is None else weights * (v_scales * VALUE_FACTOR)[None, :]
