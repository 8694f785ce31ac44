"""Gemma 2: also norms behind both halves of a layer, soft caps, and a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.gemma.model import GemmaTpPartModel

LAYER_NAMES = bm.LayerNames(
    att_post_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)


class Gemma2TpPartModel(GemmaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            window=config.window if config.is_windowed(layer_num) else None,
            softcap=config.optional_number("attn_logit_softcapping"),
            activation=bm.activation_of(config, "hidden_activation"),
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), logit_softcap=self.config.optional_number("final_logit_softcapping"))
