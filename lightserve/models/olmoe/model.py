"""OLMoE: experts, and norms over the whole projections of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec


class OlmoeLayerInfer(bm.DecoderLayerInferTpl[bm.DecoderLayerWeight]):
    def _norm_qk(self, q: Tensor, cache_kv: Tensor, layer_weight: bm.DecoderLayerWeight) -> None:
        """OLMoE clips behind the norms, not before them."""
        super()._norm_qk(q, cache_kv, layer_weight)
        if self.spec.config.hf.get("clip_qkv") is not None:
            limit = self.spec.config.number("clip_qkv")
            q.clamp_(-limit, limit)
            cache_kv.clamp_(-limit, limit)


class OlmoeTpPartModel(bm.TpPartBaseModel):
    transformer_layer_infer_class = OlmoeLayerInfer

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, has_bias = self.config, self.config.flag("attention_bias")
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.intermediate_size,
            route=RouteSpec(bm.top_k_of(config), renormalize=config.flag("norm_topk_prob")),
        )
        return replace(
            super().layer_spec(layer_num), qk_norm=bm.QkNorm.PROJECTION, qkv_bias=has_bias, o_bias=has_bias, moe=moe
        )
