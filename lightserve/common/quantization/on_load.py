"""Float weights that are quantised while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightserve.common.ops import INT4_GROUPS, InputQuant, Int4Weight, QuantizedWeight
from lightserve.common.quantization.eight_bit import supported_input_quant
from lightserve.common.quantization.quantize import KINDS, quantize
from lightserve.common.quantization.weight_format import RawTensor, WeightFormat, reads
from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization import OnLoadScheme

# Perplexity of SmolLM2-135M (1,024 tokens; 70.16 before) with offsets in groups of 32: 70.16, in groups of 64 and 128:
# 97.7; without offsets in groups of 64 and 128: 111.4, and 107.3 if the scale with the least error is searched. The
# file was quantised in groups of 32 itself, so larger groups round a second time.
W4_GROUP = 32


@reads(OnLoadScheme)
class OnLoadFormat(WeightFormat):
    """8 bits have one scale per output row, 4 bits a scale and an offset per group of W4_GROUP inputs.

    On a GPU 8-bit products round their input per token: they are twice as fast with many rows (fp8), or as fast as
    unrounded ones with a smaller kernel for few rows (int8).
    """

    def __init__(self, scheme: OnLoadScheme) -> None:
        self._kind = KINDS[scheme.kind]

    def group_size(self, in_size: int) -> int | None:
        if self._kind is not Int4Weight:
            return None
        groups = [group for group in INT4_GROUPS if in_size % group == 0 and group <= W4_GROUP]
        if not groups:
            raise ModelFilesError(f"a linear with {in_size} inputs has no 4-bit groups; use --quantization int8")
        return max(groups)

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        return {"weight": RawTensor((out_size, in_size))}

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        weight = raw["weight"]
        return quantize(weight, self._kind, self.group_size(weight.shape[1]))

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        wanted = InputQuant.NONE if self._kind is Int4Weight else InputQuant.TOKEN
        input_quant = supported_input_quant(self._kind, wanted)
        has_offsets = self._kind is Int4Weight
        return self._kind.empty(shape, group_size, device, has_offsets=has_offsets, input_quant=input_quant)
