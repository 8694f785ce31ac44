"""GraniteMoE is Granite with experts, which the checkpoint stores as one tensor."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.models.granite.model import GraniteTpPartModel

NAMES = bm.MoeNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe",
    expert=bm.ExpertNames(gate_up="input_linear", down="output_linear"),
)


class GraniteMoeTpPartModel(GraniteTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(self.config),
            intermediate_size=self.config.intermediate_size,
            route=RouteSpec(bm.top_k_of(self.config), renormalize=True),
            names=NAMES,
            layout=bm.ExpertsLayout.STACKED,
        )
        return replace(super().layer_spec(layer_num), moe=moe)
