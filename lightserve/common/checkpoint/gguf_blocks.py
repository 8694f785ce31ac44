"""The types of ggml: blocks of numbers in few bits, with a scale and perhaps an offset for each group of numbers.

``value = number * scale + offset``. All functions read blocks, uint8 ``[n, bytes]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers read at a time on a CPU. Loading SmolLM2 took 0.74 s of CPU time with this value, and 1.09 s with 1 << 15.
CHUNK = 1 << 18


class Scales(NamedTuple):
    """Of the groups of each block, float32 ``[n, groups]``."""

    scales: Tensor
    offsets: Tensor | None = None  # None: 0


class BlockType(NamedTuple):
    group_size: int
    read_numbers: Callable[[Tensor], Tensor]  # int8 [n, numbers of a block]
    read_scales: Callable[[Tensor], Scales]


def decode(name: str, blocks: Tensor, out: Tensor) -> None:
    """Write the values of blocks of type ``name`` to ``out``, float32 ``[n, numbers of a block]``."""
    if name in FLOAT_TYPES:
        out.copy_(blocks.view(FLOAT_TYPES[name]))
        return
    kind = BLOCK_TYPES[name]
    scales, offsets = kind.read_scales(blocks)
    groups = out.view(len(out), -1, kind.group_size)
    groups.copy_(kind.read_numbers(blocks).view(groups.shape))
    groups.mul_(scales.unsqueeze(-1))
    if offsets is not None:
        groups.add_(offsets.unsqueeze(-1))


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other on busy cores: SmolLM2 took 22 s with two of them, and 1.6 s with one."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


# A scale (Q4_0) or a scale and a minimum (Q4_1), then 16 bytes: low nibbles are the first half, high ones the second.
# Q5_0 and Q5_1 have 32 fifth bits before the nibbles.


def _q4_0(blocks: Tensor) -> Tensor:
    return _minus(_nibbles(blocks[:, 2:], 16), 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:], 16).view(torch.int8)


def _q5_0(blocks: Tensor) -> Tensor:
    return _minus(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])).view(torch.int8)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes is worth 16 in number i."""
    return _low_bits(packed.unsqueeze(-1), _range(8, packed), 1, 4).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    """A scale, then 32 signed bytes."""
    return blocks[:, 2:].contiguous().view(torch.int8)


def _scale_first(blocks: Tensor) -> Scales:
    return Scales(_half(blocks, 0))


def _scale_and_minimum_first(blocks: Tensor) -> Scales:
    return Scales(_half(blocks, 0), _half(blocks, 2))


# 16 groups of 16 with a 4-bit scale and minimum each, 64 bytes of bit pairs, one scale for each of these.


def _q2_k(blocks: Tensor) -> Tensor:
    return _bit_pairs(blocks[:, 16:80], 0).view(torch.int8)


def _q2_k_scales(blocks: Tensor) -> Scales:
    packed = blocks[:, :16]
    return Scales((packed & 0x0F) * _half(blocks, 80), (packed >> 4) * -_half(blocks, 82))


# 32 bytes of third bits, 64 of bit pairs, a signed 6-bit scale per 16 numbers, one scale for all of these.


def _q3_k(blocks: Tensor) -> Tensor:
    third = _low_bits(blocks[:, None, :32], _range(8, blocks)[:, None], 1, 2)
    return _minus(_bit_pairs(blocks[:, 32:96], 0) | third.flatten(1), 4)


def _q3_k_scales(blocks: Tensor) -> Scales:
    packed = blocks[:, 96:108]
    low = torch.cat([packed[:, :8] & 0x0F, packed[:, :8] >> 4], dim=1)
    upper = torch.cat([(packed[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    return Scales(((low | (upper << 4)).float() - 32) * _half(blocks, 108))


def _bit_pairs(packed: Tensor, to: int) -> Tensor:
    """Of 64 bytes with a number of four quarters of each half in the bit pairs of a byte; moved to bit ``to``."""
    shifts = _range(4, packed) * 2
    return _low_bits(packed.reshape(-1, 2, 1, 32), shifts[:, None], 3, to).flatten(1)


# Eight groups of 32 with a 6-bit scale and minimum each, one scale for each of these, 128 bytes of nibbles.
# Q5_K has 32 bytes of fifth bits before the nibbles.


def _q4_k(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 16:], 32).view(torch.int8)


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = _low_bits(blocks[:, None, 16:48], _range(8, blocks)[:, None], 1, 4)
    return (_nibbles(blocks[:, 48:], 32) | fifth.flatten(1)).view(torch.int8)


def _q4_k_scales(blocks: Tensor) -> Scales:
    """The bytes of four scales or minima are computed at once, as one int32."""
    low, high, top = blocks[:, 4:16].contiguous().view(torch.int32).unbind(1)
    scales = low & 0x3F3F3F3F, (top & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)
    minima = high & 0x3F3F3F3F, ((top >> 4) & 0x0F0F0F0F) | ((high >> 2) & 0x30303030)
    scale_bytes, minimum_bytes = (torch.stack(words, dim=1).view(torch.uint8) for words in (scales, minima))
    return Scales(scale_bytes * _half(blocks, 0), minimum_bytes * -_half(blocks, 2))


# 128 bytes of low nibbles, 64 of upper bit pairs, a signed scale per 16 numbers, one scale for all of these.


def _q6_k(blocks: Tensor) -> Tensor:
    return _minus(_nibbles(blocks[:, :128], 64) | _bit_pairs(blocks[:, 128:192], 4), 32)


def _q6_k_scales(blocks: Tensor) -> Scales:
    return Scales(blocks[:, 192:208].view(torch.int8) * _half(blocks, 208))


# Nibbles are numbers of a table. IQ4_NL: a scale, then nibbles as in Q4_0. IQ4_XS: a scale, the upper bits of eight
# 6-bit scales, their low bits, then nibbles of eight groups. MXFP4: the exponent of a scale, then nibbles as in Q4_0,
# which are floats of 4 bits, doubled here.


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _look_up(_nibbles(blocks[:, 2:], 16), IQ4_NUMBERS)


def _iq4_xs(blocks: Tensor) -> Tensor:
    return _look_up(_nibbles(blocks[:, 8:], 16), IQ4_NUMBERS)


def mxfp4_nibbles(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 1:], 16)


def _mxfp4(blocks: Tensor) -> Tensor:
    return _look_up(mxfp4_nibbles(blocks), DOUBLED_E2M1)


def _mxfp4_scales(blocks: Tensor) -> Scales:
    exponents = blocks[:, :1].int() - 128
    return Scales(torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents))


def _look_up(nibbles: Tensor, numbers: tuple[int, ...]) -> Tensor:
    table = torch.tensor(numbers, dtype=torch.int8, device=nibbles.device)
    return table.index_select(0, nibbles.flatten().int()).view(nibbles.shape)


def _iq4_xs_scales(blocks: Tensor) -> Scales:
    upper, low = blocks[:, 2:4], blocks[:, 4:8]
    upper = torch.stack([(upper >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    low = torch.stack([low & 0x0F, low >> 4], dim=-1).flatten(1)
    return Scales(((low | (upper << 4)).float() - 32) * _half(blocks, 0))


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """In every ``width`` bytes, first the low nibbles, then the high ones."""
    parts = packed.contiguous().view(len(packed), -1, width)
    return torch.stack((parts & 0x0F, parts >> 4), dim=2).flatten(1)


def _low_bits(packed: Tensor, shifts: Tensor, mask: int, to: int) -> Tensor:
    """The bits of ``mask`` from bit ``shifts`` on, moved to bit ``to``."""
    bits = (packed >> shifts).bitwise_and_(mask)
    return bits.bitwise_left_shift_(to) if to else bits


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


def _minus(numbers: Tensor, zero: int) -> Tensor:
    """Bytes wrap around as signed ones do."""
    return numbers.sub_(zero).view(torch.int8)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block, as a column of float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
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
    "MXFP4": BlockType(32, _mxfp4, _mxfp4_scales),
}
