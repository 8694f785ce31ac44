"""FlexOlmo is OLMo 2 with experts."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.models.olmo2.model import Olmo2TpPartModel


class FlexOlmoTpPartModel(Olmo2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(self.config),
            intermediate_size=self.config.intermediate_size,
            route=RouteSpec(bm.top_k_of(self.config), renormalize=self.config.flag("norm_topk_prob")),
        )
        return replace(super().layer_spec(layer_num), moe=moe)
