"""Granite is Llama with four factors: of the embedding, the attention, the residuals and the logits."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.llama.model import LlamaTpPartModel


class GraniteTpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            scale=self.config.number("attention_multiplier", 1.0),
            residual_scale=self.config.number("residual_multiplier", 1.0),
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(
            super().model_spec(),
            embedding_scale=self.config.number("embedding_multiplier", 1.0),
            logit_scale=1 / self.config.number("logits_scaling", 1.0),
        )
