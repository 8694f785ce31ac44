"""compressed-tensors' ``mxfp4-pack-quantized``: the codes and scales of an Mxfp4Weight as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightserve.common.ops import Mxfp4Weight, QuantizedWeight
from lightserve.common.quantization.weight_format import RawTensor, WeightFormat, reads
from lightserve.model_files.quantization.pack_quantized import MXFP4_GROUP, Mxfp4PackScheme


@reads(Mxfp4PackScheme)
class Mxfp4PackFormat(WeightFormat):
    def __init__(self, scheme: Mxfp4PackScheme) -> None: ...

    def group_size(self, in_size: int) -> int | None:
        return MXFP4_GROUP

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        return {
            "weight_packed": RawTensor((out_size, in_size // 2), (torch.uint8,)),
            "weight_scale": RawTensor((out_size, in_size // MXFP4_GROUP), (torch.uint8, torch.float8_e8m0fnu)),
        }

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        return Mxfp4Weight(codes=raw["weight_packed"], scales=raw["weight_scale"].view(torch.uint8))

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        return Mxfp4Weight.empty(shape, group_size, device)
