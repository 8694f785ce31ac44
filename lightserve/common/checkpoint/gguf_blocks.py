"""The types of ggml: blocks of numbers in few bits, with a scale and perhaps an offset for each group of numbers.

``value = number * scale + offset``. All functions read blocks ``[n, bytes]``. Numbers are written to a tensor
``[n, numbers of a block]`` of any type, so that the same code expands a block and repacks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Scales(NamedTuple):
    """Of the groups of each block, float32 ``[n, groups]``."""

    scales: Tensor
    offsets: Tensor | None = None  # None: 0


class BlockType(NamedTuple):
    group_size: int
    read_numbers: Callable[[Tensor, Tensor], None]
    read_scales: Callable[[Tensor], Scales]


def decode(name: str, blocks: Tensor, out: Tensor) -> None:
    """Write the values of blocks of type ``name`` to ``out``, float32 ``[n, numbers of a block]``."""
    if name in FLOAT_TYPES:
        out.copy_(blocks.view(FLOAT_TYPES[name]))
        return
    kind = BLOCK_TYPES[name]
    kind.read_numbers(blocks, out)
    scales, offsets = kind.read_scales(blocks)
    groups = out.view(len(out), -1, kind.group_size)
    groups.mul_(scales.unsqueeze(-1))
    if offsets is not None:
        groups.add_(offsets.unsqueeze(-1))


# A scale (Q4_0) or a scale and a minimum (Q4_1), then 16 bytes: low nibbles are the first half, high ones the second.


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)


# The same with 32 fifth bits before the nibbles.


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8]))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes is worth 16 in number i."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((bits & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, then 32 signed bytes."""
    out.copy_(blocks[:, 2:].view(torch.int8))


def _scale_first(blocks: Tensor) -> Scales:
    return Scales(_half(blocks, 0))


def _scale_and_minimum_first(blocks: Tensor) -> Scales:
    return Scales(_half(blocks, 0), _half(blocks, 2))


# 16 groups of 16 with a 4-bit scale and minimum each, 64 bytes of bit pairs, one scale for each of these.


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    _bit_pairs(blocks[:, 16:80], out)


def _q2_k_scales(blocks: Tensor) -> Scales:
    packed = blocks[:, :16]
    return Scales((packed & 0x0F) * _half(blocks, 80), (packed >> 4) * -_half(blocks, 82))


# 32 bytes of third bits, 64 of bit pairs, a signed 6-bit scale per 16 numbers, one scale for all of these.


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    _bit_pairs(blocks[:, 32:96], out)
    lanes = out.view(-1, 8, 32)
    for i in range(8):
        lanes[:, i] += ((blocks[:, :32] >> i) & 1) << 2
    out.sub_(4)


def _q3_k_scales(blocks: Tensor) -> Scales:
    packed = blocks[:, 96:108]
    low = torch.cat([packed[:, :8] & 0x0F, packed[:, :8] >> 4], dim=1)
    upper = torch.cat([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    return Scales(((low | (upper << 4)).float() - 32) * _half(blocks, 108))


def _bit_pairs(packed: Tensor, out: Tensor) -> None:
    """64 bytes with a number of four quarters of each half in the bit pairs of a byte."""
    halves = packed.reshape(-1, 2, 32)
    quarters = out.view(-1, 2, 4, 32)
    for quarter in range(4):
        quarters[:, :, quarter] = (halves >> (2 * quarter)) & 3


# Eight groups of 32 with a 6-bit scale and minimum each, one scale for each of these, 128 bytes of nibbles.
# Q5_K has 32 bytes of fifth bits before the nibbles.


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 16:].reshape(-1, 32), out.view(-1, 64))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 48:].reshape(-1, 32), out.view(-1, 64))
    groups = out.view(-1, 8, 32)
    for i in range(8):
        groups[:, i] += ((blocks[:, 16:48] >> i) & 1) << 4


def _q4_k_scales(blocks: Tensor) -> Scales:
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    low, high, top = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = torch.cat([low & 0x3F, (top & 0x0F) | ((low >> 6) << 4)], dim=1)
    minima = torch.cat([high & 0x3F, (top >> 4) | ((high >> 6) << 4)], dim=1)
    return Scales(scales * _half(blocks, 0), minima * -_half(blocks, 2))


# 128 bytes of low nibbles, 64 of upper bit pairs, a signed scale per 16 numbers, one scale for all of these.


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # half, nibble pair, lane
    upper = blocks[:, 128:192].reshape(-1, 2, 32)
    lanes = out.view(-1, 2, 4, 32)  # half, quarter, lane
    for quarter in range(4):
        nibble = (low[:, :, quarter % 2] >> (4 * (quarter // 2))) & 0x0F
        lanes[:, :, quarter] = nibble | (((upper >> (2 * quarter)) & 3) << 4)
    out.sub_(32)


def _q6_k_scales(blocks: Tensor) -> Scales:
    return Scales(blocks[:, 192:208].view(torch.int8) * _half(blocks, 208))


# Nibbles are numbers of a table. IQ4_NL: a scale, then nibbles as in Q4_0. IQ4_XS: a scale, the upper bits of eight 6-bit
# scales, their low bits, then nibbles of eight groups.


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.copy_(_look_up(out))


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:].reshape(-1, 16), out.view(-1, 32))
    out.copy_(_look_up(out))


def _look_up(nibbles: Tensor) -> Tensor:
    table = torch.tensor(IQ4_NUMBERS, dtype=torch.int8, device=nibbles.device)
    return table.index_select(0, nibbles.flatten().int()).view(nibbles.shape)


def _iq4_xs_scales(blocks: Tensor) -> Scales:
    upper, low = blocks[:, 2:4], blocks[:, 4:8]
    upper = torch.stack([(upper >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    low = torch.stack([low & 0x0F, low >> 4], dim=-1).flatten(1)
    return Scales(((low | (upper << 4)).float() - 32) * _half(blocks, 0))


def _nibbles(packed: Tensor, out: Tensor) -> None:
    half = packed.shape[1]
    out[:, :half] = packed & 0x0F
    out[:, half:] = packed >> 4


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block, as a column of float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_TYPES = {
    "Q4_0": BlockType(32, _q4_0, _scale_first),
    "Q4_1": BlockType(32, _q4_1, _scale_and_minimum_first),
    "Q5_0": BlockType(32, _q5_0, _scale_first),
    "Q5_1": BlockType(32, _q5_1, _scale_and_minimum_first),
    "Q8_0": BlockType(32, _q8_0, _scale_first),
    "Q2_K": BlockType(16, _q2_k, _q2_k_scales),
    "Q3_K": BlockType(16, _q3_k, _q3_k_scales),
    "Q4_K": BlockType(32, _q4_k, _q4_k_scales),
    "Q5_K": BlockType(32, _q5_k, _q4_k_scales),
    "Q6_K": BlockType(16, _q6_k, _q6_k_scales),
    "IQ4_NL": BlockType(32, _iq4_nl, _scale_first),
    "IQ4_XS": BlockType(32, _iq4_xs, _iq4_xs_scales),
}
