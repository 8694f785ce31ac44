"""Helium is Llama with interleaved rotary positions."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class HeliumTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            has_rope_pairs=True,
            qkv_bias=self.config.flag("attention_bias"),
            ffn_bias=self.config.flag("mlp_bias"),
        )
