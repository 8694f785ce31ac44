"""Experts that are not quantised: in the dtype of the activations, or in half as many bits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.quantization.experts_method import ExpertsLayout, ExpertsMethod, ExpertsSpec
from lightserve.common.quantization.unquantized import slicer


class _Tensors(NamedTuple):
    """As in ``ops.ExpertsParams``."""

    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None


class UnquantizedExperts(ExpertsMethod):
    """The tensors of ``ops.ExpertsParams``: gate and up of a unit are neighbouring rows, however they are stored.

    ``stored_dtype`` of the weights; None: ``dtype``, in which the activations and the biases are.
    """

    def __init__(
        self, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device, stored_dtype: torch.dtype | None = None
    ) -> None:
        self._spec, stored_dtype = spec, stored_dtype or dtype
        experts, units, hidden = spec.num_own, spec.num_units, spec.hidden_size
        rows = units * spec.activation.rows_per_unit

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._tensors = _Tensors(
            w13=ops.empty_weight((experts, rows, hidden), stored_dtype, device),
            w2=ops.empty_weight((experts, hidden, units), stored_dtype, device),
            b13=empty(experts, rows) if spec.has_bias else None,
            b2=empty(experts, hidden) if spec.has_bias and spec.adds_bias else None,
        )
        self.params = ops.ExpertsParams(**self._tensors._asdict(), activation=spec.activation)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(x, ids, weights, self.params)

    def kernel_key(self) -> Hashable:
        tensors = self._tensors
        shapes = tuple(tensors.w13.shape), tuple(tensors.w2.shape), tensors.w13.dtype
        return type(self), *shapes, tensors.b13 is not None, tensors.b2 is not None, self._spec.activation

    def pieces(self) -> Iterator[Piece]:
        return _PIECES[self._spec.layout](self._spec, self._tensors)


def _each(spec: ExpertsSpec, tensors: _Tensors) -> Iterator[Piece]:
    prefixes = [(f"{spec.prefix}.{expert}", 0) for expert in range(spec.num_experts)]
    prefixes += [(spec.shared_prefix, shared) for shared in range(spec.num_shared)]
    for expert, (prefix, shared_index) in enumerate(prefixes):
        slot = spec.slot_of(expert)
        yield from _expert(prefix, spec, tensors, slot, shared_index)


def _expert(prefix: str, spec: ExpertsSpec, tensors: _Tensors, slot: int | None, shared_index: int) -> Iterator[Piece]:
    """An expert in ``slot`` of this rank's, or of another rank; ``shared_index``: which of the shared experts it is."""
    is_shared = prefix == spec.shared_prefix
    total = spec.width * (spec.num_shared if is_shared else 1)
    units = slice(shared_index * spec.width + spec.units.start, shared_index * spec.width + spec.units.stop)
    by_unit = _by_unit(tensors.w13, spec.activation.rows_per_unit)
    for side, name in enumerate(spec.names.inputs(spec.activation)):
        into = None if slot is None else by_unit[slot, :, side]
        yield Piece(f"{prefix}.{name}.weight", (total, spec.hidden_size), into, slicer(units))
    into = None if slot is None else tensors.w2[slot]
    yield Piece(f"{prefix}.{spec.names.down}.weight", (spec.hidden_size, total), into, slicer(slice(None), units))


def _stacked(spec: ExpertsSpec, tensors: _Tensors) -> Iterator[Piece]:
    def gate_up(tensor: Tensor) -> Tensor:
        sides = tensor[spec.expert_range].view(spec.num_own, 2, spec.width, spec.hidden_size)
        return sides[:, :, spec.units].transpose(1, 2)

    whole = (spec.num_experts, 2 * spec.width, spec.hidden_size)
    yield Piece(f"{spec.prefix}.{spec.names.gate_up}.weight", whole, _by_unit(tensors.w13), gate_up)
    whole = (spec.num_experts, spec.hidden_size, spec.width)
    shard = slicer(spec.expert_range, slice(None), spec.units)
    yield Piece(f"{spec.prefix}.{spec.names.down}.weight", whole, tensors.w2, shard)


def _transposed(spec: ExpertsSpec, tensors: _Tensors) -> Iterator[Piece]:
    prefix, experts, hidden, width = spec.prefix, spec.num_experts, spec.hidden_size, spec.width
    both = slice(2 * spec.units.start, 2 * spec.units.stop)
    gate_up, down = f"{prefix}.{spec.names.gate_up}", f"{prefix}.{spec.names.down}"
    yield Piece(
        gate_up, (experts, hidden, 2 * width), tensors.w13.transpose(1, 2), slicer(spec.expert_range, slice(None), both)
    )
    yield Piece(down, (experts, width, hidden), tensors.w2.transpose(1, 2), slicer(spec.expert_range, spec.units))
    if spec.has_bias:
        yield Piece(f"{gate_up}_bias", (experts, 2 * width), tensors.b13, slicer(spec.expert_range, both))
        yield Piece(f"{down}_bias", (experts, hidden), tensors.b2, slicer(spec.expert_range))


_PIECES: dict[ExpertsLayout, Callable[[ExpertsSpec, _Tensors], Iterator[Piece]]] = {
    ExpertsLayout.EACH: _each,
    ExpertsLayout.STACKED: _stacked,
    ExpertsLayout.TRANSPOSED: _transposed,
}


def _by_unit(w13: Tensor, rows_per_unit: int = 2) -> Tensor:
    """``[experts, units, rows, hidden]``: gate and up of each unit, or up alone."""
    return w13.view(len(w13), -1, rows_per_unit, w13.shape[2])
