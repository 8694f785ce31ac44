"""What all weights of a model have in common.

A weight allocates this rank's memory when it is built and says, piece by piece, which checkpoint tensor goes where.
Loading is then one pass over the checkpoint in any order. Each tensor is read once, and only the part that this rank
stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightserve.common.basemodel.lora import LinearLora, LoraPool
from lightserve.common.checkpoint.piece import Piece, StoredSize, size_of_pieces, total_size
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.common.quantization import (
    ExpertsMethod,
    ExpertsMethodFactory,
    ExpertsSpec,
    LinearMethod,
    LinearMethodFactory,
    LinearSpec,
    UnquantizedExperts,
    UnquantizedLinear,
)


@dataclass(frozen=True, slots=True)
class WeightContext:
    """What all weights of a model on this rank have in common."""

    parallel: Parallel
    dtype: torch.dtype
    device: torch.device
    linear_method_factory: LinearMethodFactory = UnquantizedLinear
    experts_method_factory: ExpertsMethodFactory = UnquantizedExperts
    quantizes_kv: bool = False
    lora: LoraPool | None = None  # None: the linears take no adapters

    @property
    def tp(self) -> RankGroup:
        return self.parallel.tp

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """How to store and compute the linear ``spec``."""
        return self.linear_method_factory(spec, self.dtype, self.device)

    def linear_lora(self, spec: LinearSpec) -> LinearLora | None:
        """The adapters of the linear ``spec``."""
        return None if self.lora is None else self.lora.linear(spec)

    def experts_method(self, spec: ExpertsSpec) -> ExpertsMethod:
        """How to store and compute the experts ``spec``."""
        return self.experts_method_factory(spec, self.dtype, self.device)


class Weight(ABC):
    """One or more tensors of a layer that are used together."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]: ...

    def kernel_key(self) -> Hashable:
        """Equal for weights that launch the same kernels."""
        return (type(self), *(piece.shape for piece in self.pieces()))

    def stored_size(self) -> StoredSize:
        return size_of_pieces(self.pieces())

    def restore_weights_before_loading(self) -> None:  # noqa: B027  most need nothing
        """Called before the pieces are filled, for the first time or again. Tensors that steps read must not move."""

    def process_weights_after_loading(self) -> None:  # noqa: B027  most need nothing
        """Called once all pieces are filled. What is derived from them is written to the memory of the load before."""


class HeadValues(Weight):
    """A number for each head of this rank, in float32."""

    def __init__(self, name: str, num_heads: int, context: WeightContext) -> None:
        self._name, self._num_heads = name, num_heads
        self._own = context.tp.part_of(num_heads)
        count = self._own.stop - self._own.start
        self.tensor = torch.empty(count, dtype=torch.float32, device=context.device)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(self._name, (self._num_heads,), self.tensor, lambda values: values[self._own])


class MethodWeight(Weight):
    """What a method of quantization stores and computes."""

    method: LinearMethod | ExpertsMethod

    def pieces(self) -> Iterator[Piece]:
        return self.method.pieces()

    def kernel_key(self) -> Hashable:
        return type(self), self.method.kernel_key()

    def stored_size(self) -> StoredSize:
        return self.method.stored_size()

    def restore_weights_before_loading(self) -> None:
        self.method.restore_weights_before_loading()

    def process_weights_after_loading(self) -> None:
        self.method.process_weights_after_loading()


class WeightGroup:
    """Has weights and groups of weights as attributes. One under two names counts once."""

    def pieces(self) -> Iterator[Piece]:
        for member in self._members():
            yield from member.pieces()

    def kernel_key(self) -> Hashable:
        """Equal for groups that launch the same kernels."""
        return (type(self), *(member.kernel_key() for member in self._members()))

    def stored_size(self) -> StoredSize:
        return total_size(member.stored_size() for member in self._members())

    def restore_weights_before_loading(self) -> None:
        for member in self._members():
            member.restore_weights_before_loading()

    def process_weights_after_loading(self) -> None:
        for member in self._members():
            member.process_weights_after_loading()

    def _members(self) -> Iterable[Weight | WeightGroup]:
        members = (value for value in vars(self).values() if isinstance(value, Weight | WeightGroup))
        return {id(member): member for member in members}.values()
