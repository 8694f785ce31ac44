"""Qwen2 is Llama with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class Qwen2TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), qkv_bias=True, window=qwen_window(self.config, layer_num))


def qwen_window(config: bm.ModelConfig, layer_num: int) -> int | None:
    """Files that lack layer_types have the window in the layers from max_window_layers on."""
    if config.layer_types is None:
        is_windowed = layer_num >= config.hf.get("max_window_layers", 0)
    else:
        is_windowed = config.is_windowed(layer_num)
    return config.window if is_windowed else None
