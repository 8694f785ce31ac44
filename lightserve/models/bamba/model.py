"""Bamba: Mamba2 in most layers, attention in which half of each head rotates in the others."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.granitemoehybrid.model import expanded_width, mamba2_of
from lightserve.models.llama.model import LlamaTpPartModel

LAYER_NAMES = bm.LayerNames(
    ffn_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)
MODEL_NAMES = bm.ModelNames(final_norm="model.final_layernorm")


class BambaTpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            mixer=mamba2_of(config, expanded_width(config)) if config.is_recurrent(layer_num) else None,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES)

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("hidden_act", "silu", "swish")  # the convolution's too
