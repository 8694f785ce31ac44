"""The encodings of ggml: a decoder reads blocks, [n, bytes], and writes their values to ``out``, [n, values]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, then 16 bytes: low nibbles are the first half, high nibbles the second."""
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """A scale, a minimum, then nibbles as in Q4_0."""
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, 32 fifth bits, then nibbles as in Q4_0."""
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """A scale, a minimum, 32 fifth bits, then nibbles as in Q4_0."""
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes is worth 16 in number i."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, then 32 signed bytes."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    """16 groups of 16 with a 4-bit scale and minimum each, 64 bytes of bit pairs, one scale for each of these."""
    groups = out.view(-1, 16, 16)
    _bit_pairs(blocks[:, 16:80], out)
    groups.mul_(((blocks[:, :16] & 0x0F) * _half(blocks, 80)).unsqueeze(-1))
    groups.sub_(((blocks[:, :16] >> 4) * _half(blocks, 82)).unsqueeze(-1))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    """32 bytes of third bits, 64 of bit pairs, a signed 6-bit scale per 16 numbers, one scale for all of these."""
    _bit_pairs(blocks[:, 32:96], out)
    lanes = out.view(-1, 8, 32)
    for i in range(8):
        lanes[:, i] -= 4 * (1 - ((blocks[:, :32] >> i) & 1).float())
    packed = blocks[:, 96:108]
    low = torch.cat([packed[:, :8] & 0x0F, packed[:, :8] >> 4], dim=1)
    upper = torch.cat([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = ((low | (upper << 4)).float() - 32) * _half(blocks, 108)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))


def _bit_pairs(packed: Tensor, out: Tensor) -> None:
    """64 bytes with a number of four quarters of each half in the bit pairs of a byte."""
    halves = packed.reshape(-1, 2, 32)
    quarters = out.view(-1, 2, 4, 32)
    for quarter in range(4):
        quarters[:, :, quarter] = (halves >> (2 * quarter)) & 3


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """Eight groups of 32 with a 6-bit scale and minimum each, one scale for all of these, 128 bytes of nibbles."""
    _nibbles(blocks[:, 16:].reshape(-1, 32), out.view(-1, 64))
    _scale_groups(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """Scales as in Q4_K, 32 bytes of fifth bits, 128 bytes of nibbles."""
    _nibbles(blocks[:, 48:].reshape(-1, 32), out.view(-1, 64))
    groups = out.view(-1, 8, 32)
    for i in range(8):
        groups[:, i] += ((blocks[:, 16:48] >> i) & 1) << 4
    _scale_groups(blocks, out)


def _scale_groups(blocks: Tensor, out: Tensor) -> None:
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, high, top = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = torch.cat([low & 0x3F, (top & 0x0F) | ((low >> 6) << 4)], dim=1)
    minima = torch.cat([high & 0x3F, (top >> 4) | ((high >> 6) << 4)], dim=1)
    groups = out.view(-1, 8, 32)
    groups.mul_((scales * _half(blocks, 0)).unsqueeze(-1))
    groups.sub_((minima * _half(blocks, 2)).unsqueeze(-1))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of low nibbles, 64 of upper bit pairs, a signed scale per 16 numbers, one scale for all of these."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # half, nibble pair, lane
    upper = blocks[:, 128:192].reshape(-1, 2, 32)
    lanes = out.view(-1, 2, 4, 32)  # half, quarter, lane
    for quarter in range(4):
        nibble = (low[:, :, quarter % 2] >> (4 * (quarter // 2))) & 0x0F
        lanes[:, :, quarter] = nibble | (((upper >> (2 * quarter)) & 3) << 4)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    out.view(-1, 16, 16).sub_(32).mul_(scales.unsqueeze(-1))


def _nibbles(packed: Tensor, out: Tensor) -> None:
    half = packed.shape[1]
    out[:, :half] = packed & 0x0F
    out[:, half:] = packed >> 4


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block, as a column of float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
