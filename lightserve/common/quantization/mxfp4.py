"""4-bit floats of gpt-oss: blocks of 32 numbers along the input, each with a power of 2 as its scale."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightserve.common.ops import Mxfp4Weight, QuantizedWeight
from lightserve.common.quantization.weight_format import RawTensor, WeightFormat, reads
from lightserve.errors import ModelFilesError
from lightserve.model_files.quantization import Mxfp4Scheme

BLOCK = 32
BYTES = (torch.uint8,)


@reads(Mxfp4Scheme)
class Mxfp4Format(WeightFormat):
    def __init__(self, scheme: Mxfp4Scheme) -> None: ...

    def group_size(self, in_size: int) -> int | None:
        return BLOCK

    def raw_tensors(self, out_size: int, in_size: int) -> dict[str, RawTensor]:
        if in_size % BLOCK:
            raise ModelFilesError(f"{in_size} inputs are no whole blocks of {BLOCK}, which mxfp4 needs")
        blocks = in_size // BLOCK
        return {
            "blocks": RawTensor((out_size, blocks, BLOCK // 2), BYTES),
            "scales": RawTensor((out_size, blocks), BYTES),
        }

    def convert(self, raw: Mapping[str, Tensor]) -> QuantizedWeight:
        return Mxfp4Weight(codes=raw["blocks"].flatten(-2), scales=raw["scales"])

    def empty(self, shape: tuple[int, ...], group_size: int, device: torch.device) -> QuantizedWeight:
        return Mxfp4Weight.empty(shape, group_size, device)
