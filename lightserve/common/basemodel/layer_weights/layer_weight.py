"""The weights of one layer, and the weights before the first and after the last layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator

from lightserve.common.basemodel.layer_weights.weights import (
    NormWeight,
    RowWeight,
    VocabWeight,
    Weight,
    WeightContext,
)
from lightserve.common.checkpoint.piece import Piece
from lightserve.model_files.model_config import ModelConfig


class LayerWeight:
    """Has its weights as attributes. A weight under two names counts once."""

    def pieces(self) -> Iterator[Piece]:
        for weight in self._weights():
            yield from weight.pieces()

    def kernel_key(self) -> Hashable:
        """Equal for layers that launch the same kernels."""
        return (type(self), *(weight.kernel_key() for weight in self._weights()))

    def process_weights_after_loading(self) -> None:
        for weight in self._weights():
            weight.process_weights_after_loading()

    def _weights(self) -> Iterable[Weight]:
        return {id(weight): weight for weight in vars(self).values() if isinstance(weight, Weight)}.values()


class PreAndPostLayerWeight(LayerWeight, ABC):
    """The weights that the templates read. A model creates them and adds its own."""

    embedding: VocabWeight
    final_norm: NormWeight
    lm_head: VocabWeight

    @abstractmethod
    def __init__(self, config: ModelConfig, context: WeightContext) -> None: ...


class TransformerLayerWeight(LayerWeight, ABC):
    """The weights that the templates read. A model creates them and adds its own."""

    att_norm: NormWeight
    o_proj: RowWeight
    ffn_norm: NormWeight

    @abstractmethod
    def __init__(self, layer_num: int, config: ModelConfig, context: WeightContext) -> None: ...
