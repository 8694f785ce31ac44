from __future__ import annotations

from torch import Tensor

from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.common.basemodel.layer_infer.base_layer_infer import PreLayerInfer
from lightserve.common.basemodel.layer_weights.decoder import DecoderPreAndPostWeight


class PreLayerInferTpl(PreLayerInfer[DecoderPreAndPostWeight, InferStateInfo]):
    """Looks up the embeddings of the tokens, scales them, adds learned positions and applies a norm, as declared."""

    def context_forward(
        self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderPreAndPostWeight
    ) -> Tensor:
        return self._embed(input, infer_state, layer_weight)

    def token_forward(
        self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderPreAndPostWeight
    ) -> Tensor:
        return self._embed(input, infer_state, layer_weight)

    def _embed(self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderPreAndPostWeight) -> Tensor:
        x = layer_weight.embedding.embed(input)
        if self.spec.embedding_scale != 1.0:
            x *= self.spec.embedding_scale
        if layer_weight.positions is not None:
            x += layer_weight.positions.embed(infer_state.position_ids)
        if layer_weight.embedding_norm is not None:
            x = layer_weight.embedding_norm.norm(x)
        return x
