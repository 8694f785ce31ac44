"""ERNIE 4.5 is Llama with interleaved rotary positions, and one switch for the biases of all linears."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class Ernie45TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("use_bias")
        return replace(
            super().layer_spec(layer_num),
            has_rope_pairs=True,
            qkv_bias=has_bias,
            o_bias=has_bias,
            ffn_bias=has_bias,
        )
