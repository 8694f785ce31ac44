"""Hunyuan A13B: Hunyuan with experts by softmax, and a shared one, in every layer."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.models.hunyuan_v1_dense.model import HunyuanTpPartModel

NAMES = bm.MoeNames(router="mlp.gate.wg", shared="mlp.shared_mlp")


class HunyuanMoeTpPartModel(HunyuanTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.count("moe_intermediate_size", default=config.intermediate_size),
            route=RouteSpec(bm.top_k_of(config), renormalize=True),
            names=NAMES,
            is_router_float32=True,
            shared_size=config.intermediate_size * config.count("num_shared_expert", default=1),
        )
        return replace(super().layer_spec(layer_num), moe=moe)

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("use_mixed_mlp_moe", True)
        self.config.check_value("moe_layer_num_skipped", 0)
