"""A linear with a quantised weight, in any format."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import DUMMY_STD, Piece, StoredSize, total_size
from lightserve.common.ops import QuantizedWeight
from lightserve.common.quantization.linear_method import LinearMethod, LinearPart, LinearSpec, RmsNorm
from lightserve.common.quantization.unquantized import bias_pieces
from lightserve.common.quantization.weight_format import RawLinear, WeightFormat, own_group_size, raw_pieces
from lightserve.errors import CheckpointError, ModelFilesError

PRODUCTS: dict[type[QuantizedWeight], Callable[[Tensor, Any, Tensor | None], Tensor]] = {
    ops.Codebook4Weight: ops.linear_codebook4,
    ops.Int4Weight: ops.linear_int4,
    ops.Int8Weight: ops.linear_int8,
    ops.Fp8Weight: ops.linear_fp8,
    ops.Mxfp4Weight: ops.linear_mxfp4,
}


META = torch.device("meta")


@cache
def _product_of(kind: type[QuantizedWeight]) -> Callable[[Tensor, Any, Tensor | None], Tensor]:
    """A backend's layout of a kind is a subclass of it."""
    return next(PRODUCTS[base] for base in kind.__mro__ if base in PRODUCTS)


class _Loading:
    """A linear between its first piece and its last. Several threads load parts."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight  # in the usual layout
        self.order: Tensor | None = None  # the ``input_order`` of the parts so far
        self._lock = threading.Lock()

    def has_order(self, order: Tensor) -> bool:
        """Whether ``order`` is that of all parts so far."""
        with self._lock:
            if self.order is None:
                self.order = order
            return torch.equal(self.order, order)


class QuantizedLinear(LinearMethod):
    """One weight for all parts of the linear. Each part is converted as soon as its last tensor was read."""

    def __init__(
        self,
        spec: LinearSpec,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat,
        packed_input_bits: int = 8,
    ) -> None:
        self._spec, self._format, self._dtype, self._packed_input_bits = spec, weight_format, dtype, packed_input_bits
        self._check(spec, weight_format)
        group = own_group_size(weight_format, spec.parts[0].prefix, spec.in_size, spec.columns)
        self.weight = self._empty(group or spec.num_columns, device)
        self._loading: _Loading | None = None  # from the first piece to the last
        # Which of all inputs each column of the weight multiplies; None: the columns are those of the spec.
        self.input_order: Tensor | None = None
        self._is_loaded = False
        has_bias = spec.has_bias and spec.adds_bias
        self.bias = torch.zeros(spec.out_size, dtype=dtype, device=device) if has_bias else None

    def _empty(self, group: int, device: torch.device) -> QuantizedWeight:
        """Memory in the layout that the products read."""
        shape = self._spec.out_size, self._spec.num_columns
        if device != META:
            packed = ops.empty_packed(self._format.empty(shape, group, META), device, self._packed_input_bits)
            if packed is not None:
                return packed
        return self._format.in_final_layout(self._format.empty(shape, group, device), self._spec)

    def restore_weights_before_loading(self) -> None:
        loaded = self.weight.for_loading()
        for rows in self._spec.padding():
            _zero(loaded.rows(rows))
        self._loading = _Loading(loaded)

    @property
    def _loaded(self) -> QuantizedWeight:
        """The weight that is being loaded, in the usual layout."""
        assert self._loading is not None, "a load begins with restore_weights_before_loading"
        return self._loading.weight

    @staticmethod
    def _check(spec: LinearSpec, weight_format: WeightFormat) -> None:
        name = spec.parts[0].prefix
        if spec.is_transposed:
            raise ModelFilesError(f"{name}: a quantised linear that is stored as [in, out] is not supported")

    def pieces(self) -> Iterator[Piece]:
        for linear_part, rows in self._spec.parts_with_rows():
            yield from self._weight_pieces(linear_part, rows)
        yield from bias_pieces(self._spec, self.bias)

    def _weight_pieces(self, linear_part: LinearPart, rows: slice) -> Iterator[Piece]:
        def store(raw: Mapping[str, Tensor]) -> None:
            converted = self._format.convert(raw).columns(self._spec.columns)
            self._set_order(self._format.input_order(raw))
            is_cut = self._format.has_row_per_output
            self._loaded.rows(rows).copy_(converted if is_cut else converted.rows(linear_part.rows))

        def fill_dummy(generator: torch.Generator) -> None:
            self._loaded.rows(rows).randomize_(generator, DUMMY_STD)

        raw_tensors = self._format.raw_tensors(linear_part.out_size, self._spec.in_size)
        consumer = RawLinear(linear_part.prefix, raw_tensors, self.weight.device, store, fill_dummy)
        yield from raw_pieces(linear_part, self._format, raw_tensors, consumer)

    def _set_order(self, order: Tensor | None) -> None:
        assert self._loading is not None
        if order is not None and not self._loading.has_order(order):
            first = self._spec.parts[0].prefix
            raise CheckpointError(
                f"it has another act-order than {first}, whose input is the same; use another checkpoint"
            )

    def process_weights_after_loading(self) -> None:
        assert self._loading is not None
        self.weight.store_(self._loading.weight)
        if self._loading.order is not None:
            self._store_order(self._loading.order)
        self._loading, self._is_loaded = None, True

    def _store_order(self, order: Tensor) -> None:
        """Of all inputs, so that all ranks decide alike. Static groups have act-order, but their inputs in order."""
        if self.input_order is not None:
            self.input_order.copy_(order[self._spec.columns])
        elif not torch.equal(order, torch.arange(len(order), device=order.device)):
            if self._is_loaded:
                raise CheckpointError(
                    f"{self._spec.parts[0].prefix} has act-order, but the weights before had none; start another "
                    "server for this checkpoint"
                )
            self.input_order = order[self._spec.columns].clone()

    def bias_of_rows(self) -> Tensor | None:
        has_row_scales = self._loaded.scales.dtype == torch.float32
        return self.bias if has_row_scales else None

    def scale_rows(self, factors: Tensor) -> None:
        for tensor in (self._loaded.scales, self._loaded.offsets):
            if tensor is not None:
                tensor *= factors[:, None]
        if self.bias is not None:
            self.bias *= factors.to(self.bias.dtype)

    def mm(self, x: Tensor) -> Tensor:
        if self.input_order is not None:
            whole = x if self._spec.gather is None else self._spec.gather(x)
            x = whole.index_select(-1, self.input_order)
        return _product_of(type(self.weight))(x, self.weight, self.bias)

    def add_rms_norm_mm(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor] | None:
        """The norm rounds its output, if the product would."""
        if self._fuses_norm:
            return self._fused_mm(x, residual, norm, gated=False)
        if not self._rounds_input:
            return None
        quant = ops.row_quant_of(self.weight)
        assert quant is not None
        rows = ops.add_rms_norm_quantize(x, residual, norm.weight, norm.eps, quant)
        return ops.linear_quantized_rows(*rows, self.weight, self.bias, self._dtype), residual

    def add_rms_norm_gate_up(self, x: Tensor, residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor] | None:
        if self._fuses_norm:
            return self._fused_mm(x, residual, norm, gated=True)
        fused = self.add_rms_norm_mm(x, residual, norm)
        return None if fused is None else (ops.silu_and_mul(fused[0]), fused[1])

    def _fused_mm(self, x: Tensor, residual: Tensor, norm: RmsNorm, gated: bool) -> tuple[Tensor, Tensor] | None:
        assert isinstance(self.weight, ops.FusesNorm)
        out = self.weight.add_rms_norm_linear(x, residual, norm.weight, norm.eps, self.bias, gated)
        return None if out is None else (out, residual)

    @property
    def _fuses_norm(self) -> bool:
        return isinstance(self.weight, ops.FusesNorm) and self.input_order is None

    @property
    def _rounds_input(self) -> bool:
        """To 8 bits, of the type of the weight."""
        is_eight_bit = isinstance(self.weight, ops.Fp8Weight | ops.Int8Weight) and not self._fuses_norm
        return is_eight_bit and self.input_order is None and self.weight.input_quant is not ops.InputQuant.NONE

    @property
    def fuses_silu_and_mul(self) -> bool:
        return self._rounds_input

    def silu_and_mul_mm(self, gate_up: Tensor) -> Tensor:
        quant = ops.row_quant_of(self.weight)
        assert quant is not None
        rows = ops.silu_and_mul_quantize(gate_up, quant)
        return ops.linear_quantized_rows(*rows, self.weight, self.bias, self._dtype)

    def stored_size(self) -> StoredSize:
        bias = 0 if self.bias is None else self.bias.nbytes
        num_weights = math.prod(self.weight.shape)
        is_in_fp8 = isinstance(self.weight, ops.Fp8Weight) and self._rounds_input
        return StoredSize(self.weight.nbytes + bias, num_weights, num_weights if is_in_fp8 else 0)

    def embed(self, ids: Tensor, first_id: int) -> Tensor:
        rows = ids - first_id
        is_own = (rows >= 0) & (rows < self.weight.shape[-2])
        values = self.weight.rows(rows.where(is_own, 0).long()).dequantize()
        if self.input_order is not None:
            values = values[:, self.input_order.argsort()]
        return values.masked_fill(~is_own[:, None], 0.0).to(self._dtype)

    def kernel_key(self) -> Hashable:
        weight = self.weight
        options = weight.group_size, weight.offsets is not None, weight.has_zero_points, weight.input_quant
        return type(self), type(weight), weight.shape, *options, self.bias is not None


class StackedLinear(LinearMethod):
    """Parts with different methods, computed one after the other: a file may store q, k and v in different types."""

    def __init__(self, methods: list[LinearMethod]) -> None:
        self.methods = methods

    def pieces(self) -> Iterator[Piece]:
        for method in self.methods:
            yield from method.pieces()

    def bias_of_rows(self) -> Tensor | None:
        parts = [method.bias_of_rows() for method in self.methods]
        present = [scale for scale in parts if scale is not None]
        return torch.cat(present) if len(present) == len(parts) else None

    def scale_rows(self, factors: Tensor) -> None:
        begin = 0
        for method in self.methods:
            bias = method.bias_of_rows()
            assert bias is not None
            method.scale_rows(factors[begin : begin + len(bias)])
            begin += len(bias)

    def mm(self, x: Tensor) -> Tensor:
        return torch.cat([method.mm(x) for method in self.methods], dim=-1)

    def stored_size(self) -> StoredSize:
        return total_size(method.stored_size() for method in self.methods)

    def restore_weights_before_loading(self) -> None:
        for method in self.methods:
            method.restore_weights_before_loading()

    def process_weights_after_loading(self) -> None:
        for method in self.methods:
            method.process_weights_after_loading()

    def kernel_key(self) -> Hashable:
        return (type(self), *(method.kernel_key() for method in self.methods))


def _zero(weight: QuantizedWeight) -> None:
    weight.codes.view(torch.uint8).zero_()
    weight.scales.zero_()
    if weight.offsets is not None:
        weight.offsets.zero_()
