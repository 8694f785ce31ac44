"""Mistral and Ministral: Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class MistralTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), window=self.config.window_of(layer_num))
