"""The nearest codes for float weights.

8 bits: the number farthest from 0 in a group gets the largest code. 4 bits: the smallest number of a group gets the
smallest code, and the largest one the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.ops import FP8_MAX, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight, in_groups, pack_int4

KINDS: dict[str, type[QuantizedWeight]] = {"fp8": Fp8Weight, "int8": Int8Weight, "w4": Int4Weight}
_LARGEST = {Fp8Weight: FP8_MAX, Int8Weight: 127.0}
_TINY = torch.finfo(torch.float32).tiny  # a group may be all 0


def quantize(weight: Tensor, kind: type[QuantizedWeight], group_size: int | None) -> QuantizedWeight:
    """``weight`` ``[..., out, in]``; 4 bits have offsets. ``group_size`` None: one scale per output row."""
    group = group_size or weight.shape[-1]
    grouped = in_groups(weight.float(), group)
    if kind is Int4Weight:
        return _int4(grouped, group)
    largest = _LARGEST[kind]
    scales = (grouped.abs().amax(-1) / largest).clamp(min=_TINY)
    scaled = (grouped / scales.unsqueeze(-1)).clamp(-largest, largest).flatten(-2)
    codes = scaled.to(torch.float8_e4m3fn) if kind is Fp8Weight else scaled.round().to(torch.int8)
    return kind(codes=codes, scales=scales)


def _int4(grouped: Tensor, group: int) -> Int4Weight:
    smallest, largest = grouped.aminmax(dim=-1)
    scales = ((largest - smallest) / 15).clamp(min=_TINY)
    numbers = ((grouped - smallest.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 15) - 8
    codes = pack_int4(numbers.to(torch.int8).flatten(-2), group)
    return Int4Weight(codes=codes, scales=scales, offsets=smallest + 8 * scales)
