"""Arcee (AFM): Llama with a plain feed-forward of squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.llama.model import LlamaTpPartModel


class ArceeTpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), is_gated=False)
