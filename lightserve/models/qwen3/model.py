"""Qwen3 is Llama with a norm on every query and key head."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class Qwen3TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            qk_norm=bm.QkNorm.HEAD,
            window=self.config.window_of(layer_num),
            qkv_bias=has_bias,
            o_bias=has_bias,
        )
