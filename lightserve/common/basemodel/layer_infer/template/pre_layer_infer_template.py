from __future__ import annotations

from torch import Tensor

from lightserve.common.basemodel.layer_infer.base_layer_infer import OuterWeight, PreLayerInfer, State


class PreLayerInferTpl(PreLayerInfer[OuterWeight, State]):
    """Looks up the embeddings of the tokens."""

    def context_forward(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> Tensor:
        return self._embed(input, infer_state, layer_weight)

    def token_forward(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> Tensor:
        return self._embed(input, infer_state, layer_weight)

    def _embed(self, input: Tensor, infer_state: State, layer_weight: OuterWeight) -> Tensor:
        return layer_weight.embedding.embed(input)
