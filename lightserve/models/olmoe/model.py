"""OLMoE: experts, and norms over the whole projections of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec


class OlmoeTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, has_bias = self.config, self.config.flag("attention_bias")
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.intermediate_size,
            route=RouteSpec(bm.top_k_of(config), renormalize=config.flag("norm_topk_prob")),
        )
        return replace(
            super().layer_spec(layer_num),
            qk_norm=bm.QkNorm.PROJECTION,
            qkv_bias=has_bias,
            o_bias=has_bias,
            moe=moe,
        )

    def _verify_params(self) -> None:
        self.config.check_value("clip_qkv", None)
