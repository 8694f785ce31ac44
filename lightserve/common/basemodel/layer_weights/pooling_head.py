"""The weights of the layers between a pooled vector and a result. They are small, so they compute in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.common.basemodel.layer_weights.weight import Weight, WeightContext
from lightserve.common.checkpoint.piece import Piece
from lightserve.model_files.pooling.head import HeadLayer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class PoolingHeadWeight(Weight):
    """Every rank has all of it. Without layers, the result is the pooled vector."""

    def __init__(self, layers: Sequence[HeadLayer], context: WeightContext) -> None:
        self._layers = [_HeadLayerWeight(layer, context.device) for layer in layers]

    def pieces(self) -> Iterator[Piece]:
        for layer in self._layers:
            yield from layer.pieces()

    def forward(self, x: Tensor) -> Tensor:
        """``[texts, hidden]`` to ``[texts, size]``, in float32."""
        x = x.float()
        for layer in self._layers:
            x = layer.forward(x)
        return x


class _HeadLayerWeight:
    def __init__(self, layer: HeadLayer, device: torch.device) -> None:
        self._layer = layer
        self._weight = torch.empty(layer.out_size, layer.in_size, device=device)
        self._bias = torch.zeros(layer.out_size, device=device) if layer.has_bias else None
        self._norm_weight = torch.ones(layer.out_size, device=device)
        self._norm_bias = torch.zeros(layer.out_size, device=device) if layer.has_norm_bias else None

    def pieces(self) -> Iterator[Piece]:
        layer = self._layer
        tensors = {f"{layer.name}.weight": self._weight, f"{layer.name}.bias": self._bias}
        if layer.norm is not None:
            tensors |= {f"{layer.norm}.weight": self._norm_weight, f"{layer.norm}.bias": self._norm_bias}
        for name, tensor in tensors.items():
            if tensor is not None:
                yield Piece(name, tuple(tensor.shape), tensor)

    def forward(self, x: Tensor) -> Tensor:
        layer = self._layer
        x = ACTIVATIONS[layer.activation](F.linear(x, self._weight, self._bias))
        if layer.norm is None:
            return x
        return F.layer_norm(x, (layer.out_size,), self._norm_weight, self._norm_bias, layer.norm_eps)
