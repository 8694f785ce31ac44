"""Llama: rotary positions, RMSNorm, grouped KV heads and a gated SiLU feed-forward. Its knobs are the defaults."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class LlamaTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            qkv_bias=has_bias,
            o_bias=has_bias,
            ffn_bias=self.config.flag("mlp_bias"),
        )
