"""Qwen3 is Llama with a norm on every query and key head."""

from __future__ import annotations

from torch import Tensor

from lightserve.common import basemodel as bm
from lightserve.models.llama.model import LlamaTpPartModel, LlamaTransformerLayerWeight


class Qwen3TransformerLayerWeight(LlamaTransformerLayerWeight):
    def __init__(self, layer_num: int, config: bm.ModelConfig, context: bm.WeightContext) -> None:
        super().__init__(layer_num, config, context)
        at = f"model.layers.{layer_num}.self_attn"
        self.q_norm = bm.RmsNormWeight(f"{at}.q_norm", config.head_dim, config.norm_eps, context)
        self.k_norm = bm.RmsNormWeight(f"{at}.k_norm", config.head_dim, config.norm_eps, context)


class Qwen3TransformerLayerInfer(bm.RotaryDecoderLayerInferTpl[Qwen3TransformerLayerWeight]):
    def _get_qkv(
        self, input: Tensor, infer_state: bm.RotaryInferStateInfo, layer_weight: Qwen3TransformerLayerWeight
    ) -> tuple[Tensor, Tensor]:
        q, cache_kv = self._split_heads(layer_weight.qkv_proj.mm(input))
        k = cache_kv[:, : self.num_kv_heads]
        q = layer_weight.q_norm.norm(q)
        k.copy_(layer_weight.k_norm.norm(k))
        return q, cache_kv


class Qwen3TpPartModel(LlamaTpPartModel):
    transformer_weight_class = Qwen3TransformerLayerWeight
    transformer_layer_infer_class = Qwen3TransformerLayerInfer
