"""Unpacks two 4-bit numbers per byte in kernels.

The fast way is inline assembly: four bytes become eight numbers with 11 instructions. A nibble is put into the lowest
bits of a float whose last place is 1 (128 in bfloat16, 1024 in float16), and 128 + 8 or 1024 + 8 is subtracted.
Triton's interpreter cannot run assembly, so there is a plain way too, which float32 also takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# $0, $1: the low nibbles of the bytes of $4; $2, $3: the high ones. prmt takes bytes 0 to 3 from its first operand, and
# the high byte of the float from its second one.
_UNPACK = """
{
    .reg .b32 low, high, minus, one;
    mov.b32 minus, MINUS;
    mov.b32 one, 0x3f803f80;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, MAGIC, 0x4140;
    prmt.b32 $1, low, MAGIC, 0x4342;
    prmt.b32 $2, high, MAGIC, 0x4140;
    prmt.b32 $3, high, MAGIC, 0x4342;
    SUBTRACT
}
"""


def _asm(magic: str, minus: str, subtract: str) -> tl.constexpr:
    lines = "\n    ".join(subtract.format(f"${number}") for number in range(4))
    return tl.constexpr(_UNPACK.replace("MAGIC", magic).replace("MINUS", minus).replace("SUBTRACT", lines))


# fma with 1: add.bf16x2 exists only since compute capability 9.0
_BF16 = _asm("0x43434343", "0xc308c308", "fma.rn.bf16x2 {0}, {0}, one, minus;")
_FP16 = _asm("0x64646464", "0xe408e408", "add.f16x2 {0}, {0}, minus;")


def uses_asm(dtype: torch.dtype) -> bool:
    """Whether kernels unpack with assembly."""
    return dtype in (torch.bfloat16, torch.float16) and not triton.knobs.runtime.interpret


@triton.jit
def unpack_int4(codes, dtype: tl.constexpr, USE_ASM: tl.constexpr):
    """The low and the high numbers, -8 to 7, of bytes."""
    if USE_ASM and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif USE_ASM:  # noqa: RET505  a constexpr condition needs its else
        return tl.inline_asm_elementwise(
            _FP16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = (codes & 0x0F).to(tl.int8) - 8
        high = (codes >> 4).to(tl.int8) - 8
        return low.to(dtype), high.to(dtype)
