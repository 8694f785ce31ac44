"""HyperCLOVA X SEED Think: Granite with norms behind both halves, and a factor that multiplies the logits."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.granite.model import GraniteTpPartModel

LAYER_NAMES = bm.LayerNames(att_post_norm="post_norm1", ffn_post_norm="post_norm2")


class HyperClovaXTpPartModel(GraniteTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        if self.config.hf.get("attention_multiplier") is None:
            spec = replace(spec, scale=spec.head_dim**-0.5)
        return replace(spec, names=LAYER_NAMES) if self.config.flag("use_post_norm", default=True) else spec

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), logit_scale=self.config.number("logits_scaling", 1.0))
