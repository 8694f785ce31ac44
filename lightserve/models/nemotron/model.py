"""Nemotron 3 and 4, Minitron: LayerNorm with 1 + weight, partial rotary positions, squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.arcee.model import ArceeTpPartModel


class NemotronTpPartModel(ArceeTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), norm=bm.Norm.LAYER_PLUS_ONE)

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), norm=bm.Norm.LAYER_PLUS_ONE)
