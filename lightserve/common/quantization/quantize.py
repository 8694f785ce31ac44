"""The nearest codes for float weights. The number farthest from 0 in a group gets the largest code."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common.ops import FP8_MAX, Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight, in_groups, pack_int4

KINDS: dict[str, type[QuantizedWeight]] = {"fp8": Fp8Weight, "int8": Int8Weight, "w4": Int4Weight}
_LARGEST = {Fp8Weight: FP8_MAX, Int8Weight: 127.0, Int4Weight: 7.0}


def quantize(weight: Tensor, kind: type[QuantizedWeight], group_size: int | None) -> QuantizedWeight:
    """``weight`` ``[..., out, in]`` without offsets. ``group_size`` None: one scale per output row."""
    largest = _LARGEST[kind]
    group = group_size or weight.shape[-1]
    grouped = in_groups(weight.float(), group)
    scales = (grouped.abs().amax(-1) / largest).clamp(min=torch.finfo(torch.float32).tiny)  # a group may be all 0
    scaled = (grouped / scales.unsqueeze(-1)).clamp(-largest, largest).flatten(-2)
    return kind(codes=_codes(scaled, kind, group), scales=scales)


def _codes(scaled: Tensor, kind: type[QuantizedWeight], group: int) -> Tensor:
    if kind is Fp8Weight:
        return scaled.to(torch.float8_e4m3fn)
    numbers = scaled.round().to(torch.int8)
    return pack_int4(numbers, group) if kind is Int4Weight else numbers
