"""Cohere Command R: one LayerNorm without bias before parallel halves, interleaved rotary positions, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(ffn_norm=None)


class CohereTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER_NO_BIAS,
            is_parallel=True,
            has_rope_pairs=True,
            qk_norm=bm.QkNorm.EACH_HEAD if self.config.flag("use_qk_norm") else None,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )

    def model_spec(self) -> bm.ModelSpec:
        scale = self.config.number("logit_scale")
        return replace(super().model_spec(), norm=bm.Norm.LAYER_NO_BIAS, logit_scale=scale)
