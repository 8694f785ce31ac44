"""InternLM is Llama with biases in the attention (InternLM 3: in q, k and v, or in all linears)."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class InternLmTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("bias", True)
        return replace(super().layer_spec(layer_num), qkv_bias=has_bias, o_bias=has_bias)


class InternLm3TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("bias")
        qkv_bias = self.config.flag("qkv_bias")
        return replace(super().layer_spec(layer_num), qkv_bias=qkv_bias, o_bias=has_bias, ffn_bias=has_bias)
