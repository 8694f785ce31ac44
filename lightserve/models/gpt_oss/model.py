"""gpt-oss: biases everywhere, attention sinks, windows in every other layer, experts with a clamped gated SiLU."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import GatedSilu, RouteSpec

NAMES = bm.MoeNames(router="mlp.router")


class GptOssTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, has_bias = self.config, self.config.flag("attention_bias", default=True)
        is_windowed = config.is_windowed(layer_num) if config.layer_types else layer_num % 2 == 0
        return replace(
            super().layer_spec(layer_num),
            has_sinks=True,
            window=config.window if is_windowed else None,
            qkv_bias=has_bias,
            o_bias=has_bias,
            moe=self._moe(),
        )

    def _moe(self) -> bm.MoeSpec:
        config = self.config
        alpha, limit = config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0)
        return bm.MoeSpec(
            num_experts=bm.num_experts_of(config),
            intermediate_size=config.intermediate_size,
            route=RouteSpec(bm.top_k_of(config), renormalize=True),
            names=NAMES,
            layout=bm.ExpertsLayout.TRANSPOSED,
            activation=GatedSilu(alpha, limit, up_offset=1.0),
            router_bias=True,
            experts_bias=True,
        )
