from __future__ import annotations

from torch import Tensor

from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.common.basemodel.layer_infer.base_layer_infer import PreLayerInfer
from lightserve.common.basemodel.layer_weights.decoder import DecoderPreAndPostWeight


class PreLayerInferTpl(PreLayerInfer[DecoderPreAndPostWeight, InferStateInfo]):
    """Looks up the embeddings of the tokens, scales them, adds learned positions and applies a norm, as declared.

    Those of images take the places of their tokens.
    In models with token types, the ids of the second text of a pair are higher by the size of the vocabulary.
    """

    def context_forward(
        self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderPreAndPostWeight
    ) -> Tensor:
        return self._embed(input, infer_state, layer_weight)

    def token_forward(
        self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderPreAndPostWeight
    ) -> Tensor:
        return self._embed(input, infer_state, layer_weight)

    def _embed(self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderPreAndPostWeight) -> Tensor:
        types = None
        if layer_weight.token_types is not None:
            vocab_size = self.spec.config.vocab_size
            types, input = input // vocab_size, input % vocab_size
        x = layer_weight.embedding.embed(input)
        if self.spec.embedding_scale != 1.0:
            x *= self.spec.embedding_scale
        if layer_weight.positions is not None:
            x += layer_weight.positions.embed(infer_state.position_ids)
        if layer_weight.token_types is not None and types is not None:
            x += layer_weight.token_types.embed(types)
        if layer_weight.embedding_norm is not None:
            x = layer_weight.embedding_norm.norm(x)
        images = infer_state.step.images
        return x if images is None else images.replace_embeddings(x)
