"""LFM2 with experts behind the first dense layers, chosen by sigmoid."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.models.lfm2.model import Lfm2TpPartModel

NAMES = bm.MoeNames(
    router="feed_forward.gate",
    score_bias="feed_forward.expert_bias",
    experts="feed_forward.experts",
    expert=bm.ExpertNames(gate="w1", up="w3", down="w2"),
)


class Lfm2MoeTpPartModel(Lfm2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        is_dense = layer_num < self.config.count_or_0("num_dense_layers")
        return replace(super().layer_spec(layer_num), moe=None if is_dense else self._moe())

    def _moe(self) -> bm.MoeSpec:
        config = self.config
        route = RouteSpec(
            bm.top_k_of(config),
            "sigmoid",
            renormalize=config.flag("norm_topk_prob", default=True),
            scale=config.number("routed_scaling_factor", default=1.0),
        )
        return bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.count("moe_intermediate_size"),
            route=route,
            names=NAMES,
            has_score_bias=config.flag("use_expert_bias", default=True),
        )
