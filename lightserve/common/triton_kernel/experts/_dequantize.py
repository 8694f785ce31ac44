"""What the codes of quantised weights stand for, in the dtype of a product. All of it is exact.

Conversions of integers and of 8-bit floats take several slow instructions each. These are a few of the fast ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.common.ops import Fp8Weight, Int4Weight, Int8Weight, Mxfp4Weight, QuantizedWeight

INT4, INT8, FP8, MXFP4 = (tl.constexpr(number) for number in range(4))
KINDS: dict[type[QuantizedWeight], int] = {
    Int4Weight: INT4.value,
    Int8Weight: INT8.value,
    Fp8Weight: FP8.value,
    Mxfp4Weight: MXFP4.value,
}


@triton.jit
def small_float(codes, SIGN: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Floats of few bits, whose sign is bit ``SIGN``: the same bits in ``DTYPE``, times a power of 2 for the bias."""
    IS_WIDE: tl.constexpr = tl.float32 == DTYPE
    TOP: tl.constexpr = 31 if IS_WIDE else 15
    SHIFT: tl.constexpr = (23 if IS_WIDE else (10 if tl.float16 == DTYPE else 7)) - MANTISSA
    FACTOR: tl.constexpr = 2.0 ** ((15 if tl.float16 == DTYPE else 127) - BIAS)
    bits = codes.to(tl.int32 if IS_WIDE else tl.int16)
    magnitude = (bits & ((1 << SIGN) - 1)) << SHIFT
    sign = (bits >> SIGN) << TOP
    return (magnitude | sign).to(DTYPE, bitcast=True) * FACTOR


@triton.jit
def int4_values(codes, DTYPE: tl.constexpr):
    """0 to 15 become -8 to 7: added to the lowest bits of a power of 2, which is subtracted again."""
    IS_WIDE: tl.constexpr = tl.float32 == DTYPE
    IS_HALF: tl.constexpr = tl.float16 == DTYPE
    POWER: tl.constexpr = 23 if IS_WIDE else (10 if IS_HALF else 7)
    BITS: tl.constexpr = 0x4B000000 if IS_WIDE else (0x6400 if IS_HALF else 0x4300)  # of 2 ** POWER
    bits = codes.to(tl.int32 if IS_WIDE else tl.int16) | BITS
    return bits.to(DTYPE, bitcast=True) - (2.0**POWER + 8)


@triton.jit
def int8_values(codes, DTYPE: tl.constexpr):
    bits = (codes.to(tl.int32) ^ 0x80) | 0x4B000000  # 2 ** 23, and a number from 0 to 255
    return (bits.to(tl.float32, bitcast=True) - (2.0**23 + 128)).to(DTYPE)


@triton.jit
def byte_values(codes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Of uint8 codes of 8 bits each."""
    return small_float(codes, 7, 3, 7, DTYPE) if KIND == FP8 else int8_values(codes, DTYPE)


@triton.jit
def nibble_values(codes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Of codes of 4 bits, one in a byte."""
    return small_float(codes, 3, 1, 1, DTYPE) if KIND == MXFP4 else int4_values(codes, DTYPE)


@triton.jit
def power_of_2(exponents):
    """``2 ** (exponents - 127)`` of uint8 exponents, in float32."""
    bits = exponents.to(tl.int32)
    return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)  # 2 ** -127 is subnormal
