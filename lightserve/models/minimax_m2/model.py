"""MiniMax-M2: experts by sigmoid and a bias, partial rotary positions, norms over whole projections."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.models.mixtral.model import NAMES


class MiniMaxM2TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec, config = super().layer_spec(layer_num), self.config
        rotary_dim = config.count("rotary_dim", default=spec.rotary_dim)
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.intermediate_size,
            route=RouteSpec(bm.top_k_of(config), "sigmoid", renormalize=True),
            names=NAMES,
            is_router_float32=True,
            has_score_bias=True,
        )
        return replace(
            spec,
            rope=replace(config.rope, partial_rotary_factor=rotary_dim / config.head_dim),
            qk_norm=bm.QkNorm.PROJECTION,
            moe=moe,
        )

    def _verify_params(self) -> None:
        self.config.check_value("scoring_func", "sigmoid")
        self.config.check_value("qk_norm_type", "per_layer")
        self.config.check_value("use_qk_norm", True)
        self.config.check_value("use_routing_bias", True)
        self.config.check_value("shared_intermediate_size", 0)
