"""Unpacks two 4-bit numbers per byte in kernels.

The fast way is inline assembly: four bytes become eight numbers with 11 instructions. A nibble is put into the lowest
bits of a float whose last place is 1 (128 in bfloat16, 1024 in float16), and 128 or 1024 is subtracted together with
the zero point. Some devices and Triton's interpreter have no such assembly: they, and float32, take a plain way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightserve.common.triton_kernel import _gpu

# $0, $1: the low nibbles of the bytes of $4; $2, $3: the high ones. prmt takes bytes 0 to 3 from its first operand, and
# the high byte of the float from its second one. The operands after $4 hold a number for each byte, two a register.
_UNPACK = """
{
    .reg .b32 low, high, one, minus;
    mov.b32 one, ONE;
    mov.b32 minus, MINUS;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, MAGIC, 0x4140;
    prmt.b32 $1, low, MAGIC, 0x4342;
    prmt.b32 $2, high, MAGIC, 0x4140;
    prmt.b32 $3, high, MAGIC, 0x4342;
    LINES
}
"""
# fma with 1: add.bf16x2 came two generations of GPUs after fma.rn.bf16x2
_ADD = "fma.rn.TYPE {0}, {0}, one, {1};"
_SCALE = "fma.rn.TYPE {0}, {0}, one, minus; fma.rn.TYPE {0}, {0}, {1}, {2};"
_BITS = {
    "bf16x2": {"MAGIC": "0x43434343", "ONE": "0x3f803f80", "MINUS": "0xc308c308"},
    "f16x2": {"MAGIC": "0x64646464", "ONE": "0x3c003c00", "MINUS": "0xe408e408"},
}


def _asm(kind: str, line: str, *operands: tuple[str, str]) -> tl.constexpr:
    """``operands``: the registers for bytes 0 and 1, and for bytes 2 and 3."""
    lines = " ".join(line.format(f"${out}", *(pair[out % 2] for pair in operands)) for out in range(4))
    text = _UNPACK.replace("LINES", lines).replace("TYPE", kind)
    for name, bits in _BITS[kind].items():
        text = text.replace(name, bits)
    return tl.constexpr(text)


_ADD_BF16, _ADD_FP16 = (_asm(kind, _ADD, ("$5", "$6")) for kind in _BITS)
_SCALE_BF16, _SCALE_FP16 = (_asm(kind, _SCALE, ("$5", "$6"), ("$7", "$8")) for kind in _BITS)
_BF16_BASE, _FP16_BASE = tl.constexpr(128.0), tl.constexpr(1024.0)


def uses_asm(dtype: torch.dtype) -> bool:
    """Whether kernels unpack with assembly."""
    return dtype in (torch.bfloat16, torch.float16) and _gpu.uses_asm()


@triton.jit
def unpack_int4(codes, zeros, dtype: tl.constexpr, USE_ASM: tl.constexpr):
    """The low and the high nibbles of bytes, 0 to 15, less ``zeros``: float32, a whole number for each byte."""
    if USE_ASM and dtype == tl.bfloat16:
        minus = (-_BF16_BASE - zeros).to(tl.bfloat16)
        return tl.inline_asm_elementwise(
            _ADD_BF16, "=r,=r,=r,=r,r,r,r", [codes, minus], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif USE_ASM:  # noqa: RET505  a constexpr condition needs its else
        minus = (-_FP16_BASE - zeros).to(tl.float16)
        return tl.inline_asm_elementwise(
            _ADD_FP16, "=r,=r,=r,=r,r,r,r", [codes, minus], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = (codes & 0x0F).to(tl.float32) - zeros
        high = (codes >> 4).to(tl.float32) - zeros
        return low.to(dtype), high.to(dtype)


@triton.jit
def scaled_int4(codes, scales, offsets, dtype: tl.constexpr, USE_ASM: tl.constexpr):
    """The low and the high numbers, -8 to 7, of bytes, times ``scales`` plus ``offsets``: each for each byte."""
    if USE_ASM and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _SCALE_BF16,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, scales.to(dtype), offsets.to(dtype)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif USE_ASM:  # noqa: RET505  a constexpr condition needs its else
        return tl.inline_asm_elementwise(
            _SCALE_FP16,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, scales.to(dtype), offsets.to(dtype)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((codes & 0x0F).to(tl.float32) - 8.0) * scales + offsets
        high = ((codes >> 4).to(tl.float32) - 8.0) * scales + offsets
        return low.to(dtype), high.to(dtype)
