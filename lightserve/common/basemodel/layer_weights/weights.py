"""The weights of a model: the checkpoint tensors each one is made of, and how the ranks share them.

A weight allocates this rank's memory when it is built and says, piece by piece, which checkpoint tensor goes where.
Loading is then one pass over the checkpoint in any order. Each tensor is read once, and only the part that this rank
stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.common.quantization import (
    LinearMethod,
    LinearMethodFactory,
    LinearPart,
    LinearSpec,
    RmsNorm,
    UnquantizedLinear,
)


@dataclass(frozen=True, slots=True)
class WeightContext:
    """What all weights of a model on this rank have in common."""

    parallel: Parallel
    dtype: torch.dtype
    device: torch.device
    linear_method_factory: LinearMethodFactory = UnquantizedLinear

    @property
    def tp(self) -> RankGroup:
        return self.parallel.tp

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod:
        """How to store and compute the linear ``spec``."""
        return self.linear_method_factory(spec, self.dtype, self.device)


class Weight(ABC):
    """One or more tensors of a layer that are used together."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]: ...

    def kernel_key(self) -> Hashable:
        """Equal for weights that launch the same kernels."""
        return (type(self), *(piece.shape for piece in self.pieces()))

    def process_weights_after_loading(self) -> None:  # noqa: B027  most need nothing
        """Called once all pieces are filled."""


class NormWeight(Weight):
    """A norm over the last dimension."""

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def add_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place, then the norm of the sum."""

    def as_rms_norm(self) -> RmsNorm | None:
        """The RMSNorm that computes the same, so that a linear can fuse it; None: there is none."""
        return None


@final  # a norm that computes something else derives from NormWeight: this one may be fused
class RmsNormWeight(NormWeight):
    def __init__(self, prefix: str, size: int, eps: float, context: WeightContext) -> None:
        self.tensor = context.empty(size)
        self._prefix = prefix
        self.eps = eps

    def pieces(self) -> Iterator[Piece]:
        yield Piece(f"{self._prefix}.weight", tuple(self.tensor.shape), self.tensor)

    def norm(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.tensor, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.add_rms_norm(x, residual, self.tensor, self.eps)

    def as_rms_norm(self) -> RmsNorm:
        return RmsNorm(self.tensor, self.eps)


class LayerNormWeight(NormWeight):
    def __init__(self, prefix: str, size: int, eps: float, context: WeightContext) -> None:
        self.tensor = context.empty(size)
        self.bias = context.empty(size)
        self._prefix = prefix
        self._eps = eps

    def pieces(self) -> Iterator[Piece]:
        shape = tuple(self.tensor.shape)
        yield Piece(f"{self._prefix}.weight", shape, self.tensor)
        yield Piece(f"{self._prefix}.bias", shape, self.bias)

    def norm(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.tensor, self.bias, self._eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.add_layer_norm(x, residual, self.tensor, self.bias, self._eps)


class LinearWeight(Weight):
    """A linear: how the ranks split it. Its ``method`` stores the tensors and multiplies."""

    def __init__(self, spec: LinearSpec, context: WeightContext) -> None:
        self.method = context.linear_method(spec)

    def pieces(self) -> Iterator[Piece]:
        return self.method.pieces()

    def kernel_key(self) -> Hashable:
        return type(self), self.method.kernel_key()

    def process_weights_after_loading(self) -> None:
        self.method.process_weights_after_loading()


class VocabWeight(LinearWeight):
    """One row per token, split over the ranks; the last rank's rows past the vocabulary are zero."""

    def __init__(self, prefix: str, vocab_size: int, hidden_size: int, context: WeightContext) -> None:
        self._vocab_size = vocab_size
        self._tp = context.tp
        rows = -(-vocab_size // self._tp.size)
        self.first_id = self._tp.rank * rows
        count = max(min(vocab_size - self.first_id, rows), 0)
        own = slice(self.first_id, self.first_id + count)
        part = LinearPart(prefix, vocab_size, own, padding=rows - count)
        super().__init__(LinearSpec((part,), hidden_size, slice(0, hidden_size), is_vocab=True), context)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states of ``ids``, complete on every rank."""
        return self._tp.all_reduce(self.method.embed(ids, self.first_id))

    def logits(self, x: Tensor) -> Tensor:
        """The logits of the whole vocabulary, complete on every rank."""
        return self._tp.all_gather(self.method.mm(x))[:, : self._vocab_size]


@dataclass(frozen=True, slots=True)
class Block:
    """One linear of a ColumnWeight. Its ``heads * dim`` rows are split over the ranks by whole heads.

    With fewer heads than ranks, neighbouring ranks hold the same head.
    """

    prefix: str
    heads: int
    dim: int = 1

    def part_of(self, tp: RankGroup) -> LinearPart:
        """The rows of one rank."""
        if self.heads >= tp.size:
            count = self.heads // tp.size * self.dim
            rows = slice(tp.rank * count, (tp.rank + 1) * count)
        else:
            head = tp.rank * self.heads // tp.size
            rows = slice(head * self.dim, (head + 1) * self.dim)
        return LinearPart(self.prefix, self.heads * self.dim, rows)


class ColumnWeight(LinearWeight):
    """Linears of the same input, computed in one matmul; their outputs are split over the ranks."""

    def __init__(self, blocks: Sequence[Block], in_size: int, context: WeightContext, *, bias: bool = False) -> None:
        parts = tuple(block.part_of(context.tp) for block in blocks)
        super().__init__(LinearSpec(parts, in_size, slice(0, in_size), has_bias=bias), context)

    def mm(self, x: Tensor) -> Tensor:
        return self.method.mm(x)

    def add_norm_mm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """``mm`` of ``norm.add_norm``, and the new residual, in one op where norm and method offer it.

        ``residual`` is not valid afterwards.
        """
        rms_norm = norm.as_rms_norm()
        fused = None if rms_norm is None else self.method.add_rms_norm_mm(x, residual, rms_norm)
        if fused is not None:
            return fused
        return self.mm(norm.add_norm(x, residual)), residual

    def add_norm_gate_up(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """Gated SiLU of ``add_norm_mm``, for blocks that are gate and up; and the new residual."""
        rms_norm = norm.as_rms_norm()
        fused = None if rms_norm is None else self.method.add_rms_norm_gate_up(x, residual, rms_norm)
        if fused is not None:
            return fused
        gate_up, residual = self.add_norm_mm(x, residual, norm)
        return ops.silu_and_mul(gate_up), residual


class RowWeight(LinearWeight):
    """A linear whose input is split over the ranks; their outputs are summed."""

    def __init__(self, prefix: str, in_size: int, out_size: int, context: WeightContext, *, bias: bool = False) -> None:
        self._tp = context.tp
        width = in_size // self._tp.size
        columns = slice(self._tp.rank * width, (self._tp.rank + 1) * width)
        part = LinearPart(prefix, out_size, slice(0, out_size))
        adds_bias = self._tp.rank == 0  # the sum over the ranks contains it once
        super().__init__(LinearSpec((part,), in_size, columns, has_bias=bias, adds_bias=adds_bias), context)

    def mm(self, x: Tensor) -> Tensor:
        """The complete output, summed over the ranks."""
        return self._tp.all_reduce(self.method.mm(x))
