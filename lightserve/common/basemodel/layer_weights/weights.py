"""The leaves of a model's weights: a tensor on this rank, the checkpoint tensors it is made of, how ranks share them.

A weight allocates its tensor when it is built and says, piece by piece, which checkpoint tensor goes where. Loading is
then one pass over the checkpoint in any order, each tensor read once and only as far as this rank keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.parallel import Parallel, RankGroup


@dataclass(frozen=True, slots=True)
class WeightContext:
    """What every weight of a model on this rank has in common."""

    parallel: Parallel
    dtype: torch.dtype
    device: torch.device

    @property
    def tp(self) -> RankGroup:
        return self.parallel.tp

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor: its name, its whole shape, and where this rank keeps its part (None: it keeps none)."""

    name: str
    shape: tuple[int, ...]
    into: Tensor | None
    part: Callable[[Tensor], Tensor] = _whole


class Weight:
    """Base of the leaves."""

    def pieces(self) -> Iterator[Piece]:
        raise NotImplementedError


class RmsNormWeight(Weight):
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


class LayerNormWeight(Weight):
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


NormWeight = RmsNormWeight | LayerNormWeight


class VocabWeight(Weight):
    """A row a token, split among the ranks; the last rank's rows past the vocabulary stay zero."""

    def __init__(self, prefix: str, vocab_size: int, hidden_size: int, context: WeightContext) -> None:
        self._name = f"{prefix}.weight"
        self._vocab_size = vocab_size
        self._tp = context.tp
        rows = -(-vocab_size // self._tp.size)
        self.first_id = self._tp.rank * rows
        self.tensor = context.empty(rows, hidden_size)
        self._num_real = max(min(vocab_size - self.first_id, rows), 0)
        self.tensor[self._num_real :] = 0

    def pieces(self) -> Iterator[Piece]:
        first, count = self.first_id, self._num_real
        shape = (self._vocab_size, self.tensor.shape[1])
        yield Piece(self._name, shape, self.tensor[:count], lambda tensor: tensor[first : first + count])

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states of ``ids``, whole on every rank."""
        return self._tp.all_reduce(ops.vocab_embedding(ids, self.tensor, self.first_id))

    def logits(self, x: Tensor) -> Tensor:
        """A score for every token of the vocabulary, whole on every rank."""
        return self._tp.all_gather(ops.linear(x, self.tensor))[:, : self._vocab_size]


@dataclass(frozen=True, slots=True)
class Block:
    """One linear of a ColumnWeight: the rows ``heads * dim`` of ``prefix``, dealt to the ranks in whole heads.

    With fewer heads than ranks, neighbouring ranks hold the same head.
    """

    prefix: str
    heads: int
    dim: int = 1

    def rows_of(self, tp: RankGroup) -> slice:
        if self.heads >= tp.size:
            count = self.heads // tp.size * self.dim
            return slice(tp.rank * count, (tp.rank + 1) * count)
        head = tp.rank * self.heads // tp.size
        return slice(head * self.dim, (head + 1) * self.dim)


class ColumnWeight(Weight):
    """Linears side by side in one matmul, their output split among the ranks."""

    def __init__(self, blocks: Sequence[Block], in_size: int, context: WeightContext, *, bias: bool = False) -> None:
        self._blocks = blocks
        self._rows = [block.rows_of(context.tp) for block in blocks]
        out_size = sum(rows.stop - rows.start for rows in self._rows)
        self.tensor = context.empty(out_size, in_size)
        self.bias = context.empty(out_size) if bias else None

    def pieces(self) -> Iterator[Piece]:
        begin = 0
        for block, rows in zip(self._blocks, self._rows, strict=True):
            end = begin + rows.stop - rows.start
            whole = block.heads * block.dim
            yield Piece(f"{block.prefix}.weight", (whole, self.tensor.shape[1]), self.tensor[begin:end], _slicer(rows))
            if self.bias is not None:
                yield Piece(f"{block.prefix}.bias", (whole,), self.bias[begin:end], _slicer(rows))
            begin = end

    def mm(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.tensor, self.bias)

    def add_norm_mm(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """``mm`` of ``norm.add_norm``, and the residual from now on, which may be another tensor."""
        if type(norm) is RmsNormWeight and type(self) is ColumnWeight:  # a subclass may compute something else
            return ops.add_rms_norm_linear(x, residual, norm.tensor, norm.eps, self.tensor, self.bias)
        return self.mm(norm.add_norm(x, residual)), residual

    def add_norm_gate_up(self, x: Tensor, residual: Tensor, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """Gated SiLU of ``add_norm_mm``, where this weight holds gate and up; and the residual, as there."""
        if type(norm) is RmsNormWeight and type(self) is ColumnWeight:
            return ops.add_rms_norm_gate_up(x, residual, norm.tensor, norm.eps, self.tensor, self.bias)
        gate_up, residual = self.add_norm_mm(x, residual, norm)
        return ops.silu_and_mul(gate_up), residual


def _slicer(rows: slice) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[rows]


class RowWeight(Weight):
    """A linear whose input is split among the ranks; their outputs are summed."""

    def __init__(self, prefix: str, in_size: int, out_size: int, context: WeightContext, *, bias: bool = False) -> None:
        self._prefix = prefix
        self._in_size = in_size
        self._tp = context.tp
        self.tensor = context.empty(out_size, in_size // self._tp.size)
        self._has_bias = bias
        self.bias = context.empty(out_size) if bias and self._tp.rank == 0 else None  # the sum adds it once

    def pieces(self) -> Iterator[Piece]:
        out_size, width = self.tensor.shape
        columns = slice(self._tp.rank * width, (self._tp.rank + 1) * width)
        yield Piece(f"{self._prefix}.weight", (out_size, self._in_size), self.tensor, lambda tensor: tensor[:, columns])
        if self._has_bias:
            yield Piece(f"{self._prefix}.bias", (out_size,), self.bias)

    def mm(self, x: Tensor) -> Tensor:
        """The whole output, summed over the ranks."""
        return self._tp.all_reduce(ops.linear(x, self.tensor, self.bias))
