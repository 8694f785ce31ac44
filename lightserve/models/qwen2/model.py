"""Qwen2 is Llama with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class Qwen2TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), qkv_bias=True, window=self.config.window_of(layer_num))
