"""A linear with a quantised weight, in any format."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.ops import QuantizedWeight
from lightserve.common.quantization.linear_method import LinearMethod, LinearPart, LinearSpec
from lightserve.common.quantization.unquantized import slicer
from lightserve.common.quantization.weight_format import RawLinear, WeightFormat
from lightserve.errors import ModelFilesError

DUMMY_STD = 0.02

PRODUCTS: dict[type[QuantizedWeight], Callable[[Tensor, Any, Tensor | None], Tensor]] = {
    ops.Int4Weight: ops.linear_int4,
    ops.Int8Weight: ops.linear_int8,
    ops.Fp8Weight: ops.linear_fp8,
    ops.Mxfp4Weight: ops.linear_mxfp4,
}


class QuantizedLinear(LinearMethod):
    """One weight for all parts of the linear. Each part is converted as soon as its last tensor was read."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, weight_format: WeightFormat) -> None:
        self._spec, self._format, self._dtype = spec, weight_format, dtype
        group = weight_format.group_size(spec.in_size)
        self._check(spec, group)
        self.weight = weight_format.empty((spec.out_size, spec.num_columns), group or spec.num_columns, device)
        self._zero_padding()
        has_bias = spec.has_bias and spec.adds_bias
        self.bias = torch.zeros(spec.out_size, dtype=dtype, device=device) if has_bias else None

    def _zero_padding(self) -> None:
        end = 0
        for part in self._spec.parts:
            end += part.num_rows
            padding = self.weight.rows(slice(end - part.padding, end))
            if part.padding:
                padding.codes.view(torch.uint8).zero_()
                padding.scales.zero_()
                if padding.offsets is not None:
                    padding.offsets.zero_()

    @staticmethod
    def _check(spec: LinearSpec, group: int | None) -> None:
        name, columns = spec.parts[0].prefix, spec.columns
        if spec.is_transposed:
            raise ModelFilesError(f"{name}: a quantised linear that is stored as [in, out] is not supported")
        if group is not None and spec.in_size % group:
            raise ModelFilesError(f"{name}: {spec.in_size} inputs are no whole groups of {group}")
        if group is not None and (columns.start % group or columns.stop % group):
            raise ModelFilesError(
                f"{name}: a rank has the inputs {columns.start} to {columns.stop}, which cuts groups of {group}; "
                "use a smaller --tp"
            )

    def pieces(self) -> Iterator[Piece]:
        begin = 0
        for part in self._spec.parts:
            own = slice(begin, begin + part.num_rows - part.padding)
            yield from self._weight_pieces(part, own)
            if self._spec.has_bias:
                bias = None if self.bias is None else self.bias[own]
                yield Piece(f"{part.prefix}.bias", (part.out_size,), bias, slicer(part.rows))
            begin = own.stop + part.padding

    def _weight_pieces(self, part: LinearPart, own: slice) -> Iterator[Piece]:
        def store(raw: Mapping[str, Tensor]) -> None:
            converted = self._format.convert(raw).columns(self._spec.columns).rows(part.rows)
            self.weight.rows(own).copy_(converted)

        def fill_dummy(generator: torch.Generator) -> None:
            self.weight.rows(own).randomize_(generator, DUMMY_STD)

        raw_tensors = self._format.raw_tensors(part.out_size, self._spec.in_size)
        consumer = RawLinear(part.prefix, raw_tensors, self.weight.device, store, fill_dummy)
        for suffix, raw in raw_tensors.items():
            yield Piece(f"{part.prefix}.{suffix}", raw.shape, None, dtypes=raw.dtypes, consumer=consumer)

    def mm(self, x: Tensor) -> Tensor:
        return PRODUCTS[type(self.weight)](x, self.weight, self.bias)

    def embed(self, ids: Tensor, first_id: int) -> Tensor:
        rows = ids - first_id
        is_own = (rows >= 0) & (rows < len(self.weight.codes))
        found = self.weight.rows(rows.where(is_own, 0).long()).dequantize()
        return found.masked_fill(~is_own[:, None], 0.0).to(self._dtype)

    def kernel_key(self) -> Hashable:
        weight = self.weight
        options = weight.group_size, weight.offsets is not None, weight.input_quant, self.bias is not None
        return type(self), type(weight), weight.shape, *options


class StackedLinear(LinearMethod):
    """Parts with different methods, computed one after the other: a file may store q, k and v in different types."""

    def __init__(self, methods: list[LinearMethod]) -> None:
        self.methods = methods

    def pieces(self) -> Iterator[Piece]:
        for method in self.methods:
            yield from method.pieces()

    def mm(self, x: Tensor) -> Tensor:
        return torch.cat([method.mm(x) for method in self.methods], dim=-1)

    def process_weights_after_loading(self) -> None:
        for method in self.methods:
            method.process_weights_after_loading()

    def kernel_key(self) -> Hashable:
        return (type(self), *(method.kernel_key() for method in self.methods))
