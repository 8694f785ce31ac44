"""The parts of a forward pass. A layer owns no weights: each call gets them, together with the step's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.common.basemodel.layer_weights.layer_weight import (
    LayerWeight,
    PreAndPostLayerWeight,
    TransformerLayerWeight,
)
from lightserve.common.basemodel.spec import LayerSpec, ModelSpec
from lightserve.common.parallel import RankGroup

Weight = TypeVar("Weight", bound=LayerWeight)
OuterWeight = TypeVar("OuterWeight", bound=PreAndPostLayerWeight)
InnerWeight = TypeVar("InnerWeight", bound=TransformerLayerWeight)
State = TypeVar("State", bound=InferStateInfo)


class BaseLayerInfer(ABC, Generic[Weight, State]):
    @abstractmethod
    def context_forward(self, input: Tensor, infer_state: State, layer_weight: Weight) -> Tensor:
        """Any number of new tokens per request: prefill and mixed steps."""

    @abstractmethod
    def token_forward(self, input: Tensor, infer_state: State, layer_weight: Weight) -> Tensor:
        """One new token per request: decode."""


class PreLayerInfer(BaseLayerInfer[OuterWeight, State]):
    """Token ids to hidden states."""

    def __init__(self, spec: ModelSpec, tp: RankGroup) -> None:
        self.spec = spec
        self.tp = tp


class TransformerLayerInfer(BaseLayerInfer[InnerWeight, State]):
    """Returns what the layer adds to the hidden states, which are in ``infer_state.residual``."""

    def __init__(self, spec: LayerSpec, tp: RankGroup) -> None:
        self.spec = spec
        self.tp = tp
        self.layer_num = spec.layer_num


class PostLayerInfer(BaseLayerInfer[OuterWeight, State]):
    """Hidden states to the logits of this rank's tokens. The two forwards compute those of ``logit_rows()``."""

    def __init__(self, spec: ModelSpec, tp: RankGroup) -> None:
        self.spec = spec
        self.tp = tp

    @abstractmethod
    def logits(self, input: Tensor, infer_state: State, layer_weight: OuterWeight, rows: Tensor | None) -> Tensor:
        """The logits of ``rows``; of all rows, if None, and the hidden states are not valid afterwards."""

    @abstractmethod
    def final_states(self, input: Tensor, infer_state: State, layer_weight: OuterWeight, rows: Tensor | None) -> Tensor:
        """The hidden states that the head reads, of ``rows`` or of all rows; as for ``logits``."""

    @abstractmethod
    def logits_of(self, states: Tensor, layer_weight: OuterWeight) -> Tensor:
        """The logits of rows of ``final_states``."""
