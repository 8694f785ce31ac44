"""Seed-OSS is Llama with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class SeedOssTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            qkv_bias=self.config.flag("attention_bias", True),
            o_bias=self.config.flag("attention_out_bias"),
            ffn_bias=self.config.flag("mlp_bias"),
        )
