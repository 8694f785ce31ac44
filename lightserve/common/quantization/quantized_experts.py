"""Experts with quantised weights, in any format and any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import DUMMY_STD, Piece, StoredSize
from lightserve.common.ops import QuantizedWeight
from lightserve.common.quantization.experts_method import ExpertsLayout, ExpertsMethod, ExpertsSpec
from lightserve.common.quantization.unquantized import slicer
from lightserve.common.quantization.weight_format import RawLinear, RawTensor, WeightFormat, own_group_size
from lightserve.errors import ModelFilesError

META = torch.device("meta")
WHOLE_EXPERTS = "use --ep, with which ranks have whole experts, or a smaller --tp"


class ExpertsFormats(NamedTuple):
    gate_up: WeightFormat
    down: WeightFormat


class _Stored:
    """The weight of all experts that products read, and between its first piece and its last also the one to fill."""

    def __init__(self, empty: Callable[[torch.device], QuantizedWeight], device: torch.device, input_bits: int) -> None:
        packed = None if device == META else ops.empty_packed(empty(META), device, input_bits)
        self.weight = empty(device) if packed is None else packed
        self.loading = self.weight

    def begin(self) -> None:
        self.loading = self.weight.for_loading()

    def end(self) -> None:
        self.weight.store_(self.loading)
        self.loading = self.weight


class _Linear(NamedTuple):
    """A linear of the checkpoint, and where this rank stores its part of it."""

    stored: _Stored  # w13 or w2
    format: WeightFormat
    out_size: int  # of the whole linear
    in_size: int
    rows: slice | Tensor  # of the whole linear that this rank stores
    columns: slice
    into: slice  # rows of an expert's weight

    def raw_tensors(self) -> dict[str, RawTensor]:
        return self.format.raw_tensors(self.out_size, self.in_size)

    def store(self, expert: int, raw: Mapping[str, Tensor]) -> None:
        self._own(expert).copy_(self.format.convert(raw).columns(self.columns).rows(self.rows))

    def fill_dummy(self, expert: int, generator: torch.Generator) -> None:
        self._own(expert).randomize_(generator, DUMMY_STD)

    def _own(self, expert: int) -> QuantizedWeight:
        return self.stored.loading.expert(expert).rows(self.into)


class QuantizedExperts(ExpertsMethod):
    """The weights of ``ops.ExpertsParams``, each of which is converted as soon as its last tensor was read."""

    def __init__(
        self,
        spec: ExpertsSpec,
        dtype: torch.dtype,
        device: torch.device,
        formats: ExpertsFormats,
        packed_input_bits: int = 8,
    ) -> None:
        self._spec, self._formats = spec, formats
        _check_order(spec, formats)
        experts, units, hidden = spec.num_own, spec.num_units, spec.hidden_size
        rows = units * spec.activation.rows_per_unit
        group_13 = own_group_size(formats.gate_up, spec.prefix, hidden, slice(0, hidden))
        group_2 = own_group_size(formats.down, spec.prefix, spec.width, spec.units, WHOLE_EXPERTS)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def stored(weight_format: WeightFormat, shape: tuple[int, ...], group: int | None) -> _Stored:
            empty = partial(weight_format.empty, shape, group or shape[-1])
            return _Stored(empty, device, packed_input_bits)

        self._gate_up_stored = stored(formats.gate_up, (experts, rows, hidden), group_13)
        self._down_stored = stored(formats.down, (experts, hidden, units), group_2)
        _check_kinds(spec, self.w13, self.w2)
        self.params = ops.ExpertsParams(
            w13=self.w13,
            w2=self.w2,
            b13=zeros(experts, rows) if spec.has_bias else None,
            b2=zeros(experts, hidden) if spec.has_bias and spec.adds_bias else None,
            activation=spec.activation,
        )

    @property
    def w13(self) -> QuantizedWeight:
        return self._gate_up_stored.weight

    @property
    def w2(self) -> QuantizedWeight:
        return self._down_stored.weight

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(x, ids, weights, self.params)

    def kernel_key(self) -> Hashable:
        params = self.params
        options = params.b13 is not None, params.b2 is not None, params.activation
        return type(self), *(_kernel_key(weight) for weight in (self.w13, self.w2)), *options

    def stored_size(self) -> StoredSize:
        biases = sum(bias.nbytes for bias in (self.params.b13, self.params.b2) if bias is not None)
        num_weights = math.prod(self.w13.shape) + math.prod(self.w2.shape)
        return StoredSize(self.w13.nbytes + self.w2.nbytes + biases, num_weights)

    def restore_weights_before_loading(self) -> None:
        for stored in (self._gate_up_stored, self._down_stored):
            stored.begin()

    def process_weights_after_loading(self) -> None:
        for stored in (self._gate_up_stored, self._down_stored):
            stored.end()

    def pieces(self) -> Iterator[Piece]:
        if self._spec.layout is ExpertsLayout.EACH:
            return self._each()
        return self._stacked()

    def _each(self) -> Iterator[Piece]:
        spec = self._spec
        prefixes = [(f"{spec.prefix}.{expert}", spec.width, 0) for expert in range(spec.num_experts)]
        prefixes += [(spec.shared_prefix, spec.num_shared * spec.width, index) for index in range(spec.num_shared)]
        for number, (prefix, width, index) in enumerate(prefixes):
            slot = spec.slot_of(number)
            first = index * spec.width
            units = slice(first + spec.units.start, first + spec.units.stop)
            for side, name in enumerate(spec.names.inputs(spec.activation)):
                into = slice(side, None, spec.activation.rows_per_unit)
                yield from _pieces_of_one(f"{prefix}.{name}", self._gate_up(width, units, into), slot)
            yield from _pieces_of_one(f"{prefix}.{spec.names.down}", self._down(width, units), slot)

    def _stacked(self) -> Iterator[Piece]:
        spec, is_transposed = self._spec, self._spec.layout is ExpertsLayout.TRANSPOSED
        columns, width = spec.units, spec.width
        if is_transposed:
            rows: slice | Tensor = slice(2 * columns.start, 2 * columns.stop)
        else:
            units = torch.arange(columns.start, columns.stop)
            rows = torch.stack((units, units + width), dim=1).flatten()
        gate_up, down = f"{spec.prefix}.{spec.names.gate_up}", f"{spec.prefix}.{spec.names.down}"
        yield from _pieces_of_all(gate_up, self._gate_up(2 * width, rows, slice(None)), spec)
        yield from _pieces_of_all(down, self._down(width, columns), spec)
        if spec.has_bias:
            yield Piece(
                f"{gate_up}_bias", (spec.num_experts, 2 * width), self.params.b13, slicer(spec.expert_range, rows)
            )
            yield Piece(f"{down}_bias", (spec.num_experts, spec.hidden_size), self.params.b2, slicer(spec.expert_range))

    def _gate_up(self, out_size: int, rows: slice | Tensor, into: slice) -> _Linear:
        hidden = self._spec.hidden_size
        return _Linear(self._gate_up_stored, self._formats.gate_up, out_size, hidden, rows, slice(0, hidden), into)

    def _down(self, in_size: int, units: slice) -> _Linear:
        hidden = self._spec.hidden_size
        return _Linear(self._down_stored, self._formats.down, hidden, in_size, slice(None), units, slice(None))


def _check_order(spec: ExpertsSpec, formats: ExpertsFormats) -> None:
    if any(weight_format.has_input_order for weight_format in formats):
        raise ModelFilesError(
            f"{spec.prefix}: experts with act-order are not supported, since each expert would need the inputs in an "
            "order of its own; use a checkpoint without act-order (desc_act false)"
        )


def _check_kinds(spec: ExpertsSpec, *weights: QuantizedWeight) -> None:
    for weight in weights:
        if isinstance(weight, ops.Codebook4Weight) and weight.device.type not in ("cpu", "meta"):
            raise ModelFilesError(
                f"{spec.prefix}: experts in nf4 are not supported on a GPU; use the unquantised checkpoint with "
                "--quantization w4"
            )


def _kernel_key(weight: QuantizedWeight) -> Hashable:
    return type(weight), weight.shape, weight.group_size, weight.offsets is not None


def _pieces_of_one(prefix: str, linear: _Linear, slot: int | None) -> Iterator[Piece]:
    """Of one expert, in ``slot`` of this rank's, or of another rank."""
    raw_tensors, consumer = linear.raw_tensors(), None
    if slot is not None:
        at = slot
        consumer = RawLinear(
            prefix,
            raw_tensors,
            linear.stored.weight.device,
            lambda raw: linear.store(at, raw),
            lambda generator: linear.fill_dummy(at, generator),
        )
    for suffix, raw in raw_tensors.items():
        name, shapes = f"{prefix}.{suffix}", raw.other_shapes
        yield Piece(name, raw.shape, None, dtypes=raw.dtypes, consumer=consumer, other_shapes=shapes)


def _pieces_of_all(prefix: str, linear: _Linear, spec: ExpertsSpec) -> Iterator[Piece]:
    """Of all experts, whose tensors the checkpoint stores as one each."""
    raw_tensors = linear.raw_tensors()
    parent, _, name = prefix.rpartition(".")
    names = {suffix: _stacked_name(name, suffix, spec.layout) for suffix in raw_tensors}
    is_transposed = spec.layout is ExpertsLayout.TRANSPOSED and "weight" in raw_tensors
    if is_transposed and list(raw_tensors) != ["weight"]:
        raise ModelFilesError(
            f"{prefix}: quantised experts that are stored as [in, out] are not supported; use the unquantised "
            "checkpoint, perhaps with --quantization"
        )

    def store(raw: Mapping[str, Tensor]) -> None:
        for slot in range(spec.num_own):
            expert = {suffix: raw[stored][slot] for suffix, stored in names.items()}
            linear.store(slot, {suffix: tensor.T for suffix, tensor in expert.items()} if is_transposed else expert)

    def fill_dummy(generator: torch.Generator) -> None:
        for slot in range(spec.num_own):
            linear.fill_dummy(slot, generator)

    by_name = {names[suffix]: raw for suffix, raw in raw_tensors.items()}
    consumer = RawLinear(parent, by_name, linear.stored.weight.device, store, fill_dummy)
    for stored, raw in by_name.items():
        shape = (spec.num_experts, *(raw.shape[::-1] if is_transposed else raw.shape))
        others = tuple((spec.num_experts, *other_shape) for other_shape in raw.other_shapes)
        yield Piece(f"{parent}.{stored}", shape, None, slicer(spec.expert_range), raw.dtypes, consumer, others)


def _stacked_name(linear: str, suffix: str, layout: ExpertsLayout) -> str:
    """gpt-oss has parameters instead of linears: gate_up_proj, gate_up_proj_bias, gate_up_proj_blocks."""
    if layout is ExpertsLayout.STACKED:
        return f"{linear}.{suffix}"
    return linear if suffix == "weight" else f"{linear}_{suffix}"
