"""Jais 2: Arcee's squared ReLU, with LayerNorm."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.arcee.model import ArceeTpPartModel


class Jais2TpPartModel(ArceeTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), norm=bm.Norm.LAYER)

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), norm=bm.Norm.LAYER)
