"""What all recurrent mixers have in common.

A mixer is a spec, which a model sets as ``LayerSpec.mixer``, and the weights that the spec builds, which compute it.
Nothing else knows its kind: sizes of states, the split over ranks and the checkpoint's names are the mixer's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.weight import (
    HeadValues as HeadValues,
    Weight,
    WeightContext,
    WeightGroup,
)
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.kv.layout import StateGroup, StateTensor
from lightserve.errors import ModelFilesError

if TYPE_CHECKING:
    from lightserve.common.basemodel.spec import LayerSpec


class MixerWeight(WeightGroup):
    """The weights of a mixer, and how it computes."""

    @abstractmethod
    def forward(self, x: Tensor, states: Sequence[Tensor], batch: ops.StateBatch) -> Tensor:
        """Normed hidden states to what the mixer adds to them, complete on every rank.

        ``states`` are the layer's: a tensor ``[rows, *shape]`` for each one of ``MixerSpec.state_tensors``. Requests
        continue from the rows that they read, and their new states are in the rows that they write.
        """


class MixerSpec(ABC):
    """The sizes of a mixer, and its names in the checkpoint. A frozen dataclass: layers with equal ones are alike."""

    @abstractmethod
    def weight(self, spec: LayerSpec, context: WeightContext) -> MixerWeight: ...

    @abstractmethod
    def state_tensors(self, tp_size: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """What a request stores in the layer, on one of ``tp_size`` ranks of a model that computes in ``dtype``."""

    @abstractmethod
    def check_tp(self, size: int) -> None:
        """Check that ``size`` ranks can split the mixer."""

    @abstractmethod
    def num_weights(self, hidden_size: int) -> int:
        """Roughly, of all linears."""


def state_groups(
    specs: Iterable[LayerSpec], tp_size: int, dtype: torch.dtype, sum_dtype: torch.dtype = torch.float32
) -> tuple[StateGroup, ...]:
    """The layers with mixers, those whose states have the same shapes together. ``sum_dtype``: of matrices."""
    layers: dict[tuple[StateTensor, ...], list[int]] = {}
    for spec in specs:
        if spec.mixer is not None:
            tensors = (_stored(tensor, sum_dtype) for tensor in spec.mixer.state_tensors(tp_size, dtype))
            layers.setdefault(tuple(tensors), []).append(spec.layer_num)
    return tuple(StateGroup(tuple(numbers), tensors) for tensors, numbers in layers.items())


def _stored(tensor: StateTensor, sum_dtype: torch.dtype) -> StateTensor:
    return replace(tensor, dtype=sum_dtype) if tensor.is_sum else tensor


def check_divides(what: str, count: int, tp_size: int) -> None:
    """Check that ranks can share them: each has its own."""
    if count % tp_size:
        raise ModelFilesError(f"{count} {what} do not divide among tp={tp_size} ranks; choose a tp that divides them")


def check_heads(what: str, count: int, tp_size: int) -> None:
    """Check that each rank gets the same number of heads, or that ranks share heads equally."""
    if count % tp_size and tp_size % count:
        raise ModelFilesError(f"{count} {what} and tp={tp_size}: one must divide the other")


class DecayRates(HeadValues):
    """``-exp(A_log)``: the log of the decay of each head, for a step of size 1."""

    def process_weights_after_loading(self) -> None:
        self.tensor.exp_().neg_()


class ConvWeight(Weight):
    """A short convolution over channels that the ranks share: ``parts`` of heads with so many channels each."""

    def __init__(
        self, prefix: str, parts: Sequence[tuple[int, int]], width: int, context: WeightContext, *, bias: bool = False
    ) -> None:
        self._prefix = prefix
        self._num_channels = sum(heads * dim for heads, dim in parts)
        self._own = torch.cat(list(_own_channels(parts, context)))
        self.tensor = context.empty(len(self._own), width)
        self.bias = context.empty(len(self._own)) if bias else None

    def pieces(self) -> Iterator[Piece]:
        width = self.tensor.shape[1]
        shape = (self._num_channels, 1, width)
        yield Piece(f"{self._prefix}.weight", shape, self.tensor, lambda weight: weight[self._own, 0])
        if self.bias is not None:
            yield Piece(f"{self._prefix}.bias", shape[:1], self.bias, lambda bias: bias[self._own])

    @property
    def num_channels(self) -> int:
        """On this rank."""
        return len(self.tensor)


def _own_channels(parts: Sequence[tuple[int, int]], context: WeightContext) -> Iterator[Tensor]:
    first = 0
    for num_heads, dim in parts:
        heads = context.tp.part_of(num_heads)
        yield torch.arange(first + heads.start * dim, first + heads.stop * dim)
        first += num_heads * dim


def _own_rows(channels: Tensor, weight: Tensor) -> Tensor:
    return weight[channels, 0]


class JoinedConvWeight(Weight):
    """The same where the checkpoint has a tensor for each of the parts."""

    def __init__(
        self, prefixes: Sequence[str], parts: Sequence[tuple[int, int]], width: int, context: WeightContext
    ) -> None:
        self._prefixes, self._totals = prefixes, [heads * dim for heads, dim in parts]
        self._own = [torch.cat(list(_own_channels([heads], context))) for heads in parts]
        self.tensor = context.empty(sum(map(len, self._own)), width)

    def pieces(self) -> Iterator[Piece]:
        targets = self.tensor.split_with_sizes(list(map(len, self._own)))
        for prefix, total, channels, target in zip(self._prefixes, self._totals, self._own, targets, strict=True):
            shape = (total, 1, self.tensor.shape[1])
            yield Piece(f"{prefix}.weight", shape, target, partial(_own_rows, channels))

    @property
    def num_channels(self) -> int:
        """On this rank."""
        return len(self.tensor)
