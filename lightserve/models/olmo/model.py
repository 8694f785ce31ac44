"""OLMo is Llama with LayerNorms that have no weights; q, k and v may be clamped."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.llama.model import LlamaTpPartModel


class OlmoTpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            norm=bm.Norm.LAYER_NO_WEIGHT,
            clip_qkv=self.config.optional_number("clip_qkv"),
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), norm=bm.Norm.LAYER_NO_WEIGHT)
