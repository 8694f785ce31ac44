"""Quantised experts in the layout of the C library: one weight for each, whose product reads it from first to last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.cpu_kernel._library import BACKEND, library
from lightserve.common.cpu_kernel.packed_weight import Packed, empty_like, empty_packed
from lightserve.common.ops import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedExperts(QuantizedWeight):
    """``codes`` and ``scales`` are empty."""

    experts: tuple[Packed, ...]
    usual: QuantizedWeight  # the weight in the usual layout, on the meta device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.usual.shape

    @property
    def group_size(self) -> int:
        return self.experts[0].group_size

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    def for_loading(self) -> QuantizedWeight:
        return empty_like(self.usual, self.device)

    def store_(self, loaded: QuantizedWeight) -> None:
        for number, expert in enumerate(self.experts):
            expert.store_(loaded.expert(number))

    def expert(self, number: int) -> Any:
        return self.experts[number]

    def values(self) -> Tensor:
        return torch.stack([expert.values() for expert in self.experts])

    def dequantize(self) -> Tensor:
        return torch.stack([expert.dequantize() for expert in self.experts])


def empty_packed_experts(usual: QuantizedWeight, input_bits: int = 8) -> PackedExperts | None:
    """Memory for weights like ``usual`` ``[experts, out, in]``; None: the library cannot compute with them."""
    experts = [empty_packed(usual.expert(number), input_bits) for number in range(usual.shape[0])]
    packed = tuple(expert for expert in experts if expert is not None)
    if len(packed) < len(experts):
        return None
    meta = empty_like(usual, torch.device("meta"))
    return PackedExperts(codes=torch.empty(0), scales=torch.empty(0), experts=packed, usual=meta)


def _empty(usual: QuantizedWeight, device: torch.device, input_bits: int) -> QuantizedWeight | None:
    make = empty_packed if usual.codes.dim() == 2 else empty_packed_experts
    return make(usual, input_bits)


if library is not None:
    ops.packs_for(BACKEND)(_empty)
