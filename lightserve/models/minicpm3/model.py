"""MiniCPM3: latent attention, and MiniCPM's factors of the embedding, the residuals and the logits."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.minicpm.model import embedding_and_logit_scale, residual_scale
from lightserve.models.youtu.model import YoutuTpPartModel


class MiniCpm3TpPartModel(YoutuTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), residual_scale=residual_scale(self.config))

    def model_spec(self) -> bm.ModelSpec:
        embedding_scale, logit_scale = embedding_and_logit_scale(self.config)
        return replace(super().model_spec(), embedding_scale=embedding_scale, logit_scale=logit_scale)
