"""The weights of norms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.weight import Weight, WeightContext
from lightserve.common.basemodel.spec import Norm
from lightserve.common.checkpoint.piece import Piece
from lightserve.common.quantization import RmsNorm


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
    """RMSNorm with a weight, or with 1 + weight."""

    def __init__(self, prefix: str, size: int, eps: float, context: WeightContext, *, adds_one: bool = False) -> None:
        # 1 + weight stays in float32: half precision would round most of the weight away
        self.tensor = torch.empty(size, dtype=torch.float32 if adds_one else context.dtype, device=context.device)
        self._prefix = prefix
        self._adds_one = adds_one
        self.eps = eps

    def pieces(self) -> Iterator[Piece]:
        yield Piece(f"{self._prefix}.weight", tuple(self.tensor.shape), self.tensor)

    def process_weights_after_loading(self) -> None:
        if self._adds_one:
            self.tensor += 1

    def norm(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.tensor, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.add_rms_norm(x, residual, self.tensor, self.eps)

    def as_rms_norm(self) -> RmsNorm:
        return RmsNorm(self.tensor, self.eps)


class LayerNormWeight(NormWeight):
    """LayerNorm with a weight and a bias, with 1 + weight, without a bias, or without both."""

    def __init__(self, prefix: str, size: int, eps: float, context: WeightContext, kind: Norm = Norm.LAYER) -> None:
        self._kind = kind
        self._prefix = prefix
        self._eps = eps
        dtype = torch.float32 if kind is Norm.LAYER_PLUS_ONE else context.dtype
        self.tensor = torch.ones(size, dtype=dtype, device=context.device)
        self.bias = torch.zeros(size, dtype=dtype, device=context.device)

    def pieces(self) -> Iterator[Piece]:
        shape = tuple(self.tensor.shape)
        if self._kind is not Norm.LAYER_NO_WEIGHT:
            yield Piece(f"{self._prefix}.weight", shape, self.tensor)
        if self._kind in (Norm.LAYER, Norm.LAYER_PLUS_ONE):
            yield Piece(f"{self._prefix}.bias", shape, self.bias)

    def process_weights_after_loading(self) -> None:
        if self._kind is Norm.LAYER_PLUS_ONE:
            self.tensor += 1

    def norm(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.tensor, self.bias, self._eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.add_layer_norm(x, residual, self.tensor, self.bias, self._eps)


class SplitNormWeight(Weight):
    """RMSNorm over rows that the ranks share, as outputs of a ColumnWeight and inputs of a RowWeight.

    ``indices`` are the numbers of a row that this rank has, and ``copies`` the ranks that have the same; the default is
    an equal part for each rank.
    """

    def __init__(
        self,
        prefix: str,
        size: int,
        eps: float,
        context: WeightContext,
        *,
        indices: Tensor | None = None,
        copies: int = 1,
    ) -> None:
        self._prefix, self._size, self._eps, self._tp = prefix, size, eps, context.tp
        self._own = torch.arange(size)[self._tp.part_of(size)] if indices is None else indices
        self._copies = copies
        self.tensor = context.empty(len(self._own))

    def pieces(self) -> Iterator[Piece]:
        yield Piece(f"{self._prefix}.weight", (self._size,), self.tensor, lambda weight: weight[self._own])

    def norm(self, x: Tensor) -> Tensor:
        """Of this rank's part of every row, ``[tokens, part]``."""
        if self._tp.size == 1:
            return ops.rms_norm(x, self.tensor, self._eps)
        wide = x.float()
        squares = self._tp.all_reduce(wide.square().sum(-1, keepdim=True)) / self._copies
        return (wide * torch.rsqrt(squares / self._size + self._eps) * self.tensor.float()).to(x.dtype)


def norm_weight(kind: Norm, prefix: str, size: int, eps: float, context: WeightContext) -> NormWeight:
    if kind in (Norm.RMS, Norm.RMS_PLUS_ONE):
        return RmsNormWeight(prefix, size, eps, context, adds_one=kind is Norm.RMS_PLUS_ONE)
    return LayerNormWeight(prefix, size, eps, context, kind)
