"""GraniteMoE is Granite with experts, which the checkpoint stores as one tensor."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec

NAMES = bm.MoeNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe",
    expert=bm.ExpertNames(gate_up="input_linear", down="output_linear"),
)


class GraniteMoeTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, has_bias = self.config, self.config.flag("attention_bias")
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.intermediate_size,
            route=RouteSpec(bm.top_k_of(config), renormalize=True),
            names=NAMES,
            layout=bm.ExpertsLayout.STACKED,
        )
        return replace(
            super().layer_spec(layer_num),
            scale=config.number("attention_multiplier", default=1.0),
            residual_scale=config.number("residual_multiplier", default=1.0),
            qkv_bias=has_bias,
            o_bias=has_bias,
            moe=moe,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(
            super().model_spec(),
            embedding_scale=self.config.number("embedding_multiplier", default=1.0),
            logit_scale=1 / self.config.number("logits_scaling", default=1.0),
        )
