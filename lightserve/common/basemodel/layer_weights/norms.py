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


def norm_weight(kind: Norm, prefix: str, size: int, eps: float, context: WeightContext) -> NormWeight:
    if kind in (Norm.RMS, Norm.RMS_PLUS_ONE):
        return RmsNormWeight(prefix, size, eps, context, adds_one=kind is Norm.RMS_PLUS_ONE)
    return LayerNormWeight(prefix, size, eps, context, kind)
