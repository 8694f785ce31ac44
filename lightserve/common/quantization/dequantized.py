"""Weights that are stored in few bits and kept as floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightserve.common.checkpoint.piece import DUMMY_STD, Piece
from lightserve.common.quantization.linear_method import LinearPart, LinearSpec
from lightserve.common.quantization.unquantized import UnquantizedLinear
from lightserve.common.quantization.weight_format import RawLinear, WeightFormat, raw_pieces


class DequantizedLinear(UnquantizedLinear):
    """For weights that an op reads itself, such as the latent expansion of DeepSeek's attention."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> None:
        super().__init__(spec, dtype, device)
        self._format = weight_format

    def _weight_pieces(self, linear_part: LinearPart, weight_rows: slice) -> Iterator[Piece]:
        def store(raw: Mapping[str, Tensor]) -> None:
            whole, order = self._format.convert(raw).dequantize(), self._format.input_order(raw)
            if order is not None:
                whole = whole[:, order.argsort()]
            columns = whole[:, self._spec.columns].to(self.weight.dtype)
            self.weight[weight_rows] = columns if self._format.has_row_per_output else columns[linear_part.rows]

        def fill_dummy(generator: torch.Generator) -> None:
            self.weight[weight_rows].normal_(std=DUMMY_STD, generator=generator)

        raw_tensors = self._format.raw_tensors(linear_part.out_size, self._spec.in_size)
        consumer = RawLinear(linear_part.prefix, raw_tensors, self.weight.device, store, fill_dummy)
        yield from raw_pieces(linear_part, self._format, raw_tensors, consumer)
