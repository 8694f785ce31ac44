"""Apertus: norms on every query and key head, and a plain feed-forward of xIELU, which has learned numbers."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(att_norm="attention_layernorm", ffn_norm="feedforward_layernorm")


class ApertusTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            qk_norm=bm.QkNorm.HEAD,
            qkv_bias=has_bias,
            o_bias=has_bias,
            is_gated=False,
        )

    def _verify_params(self) -> None:
        self.config.check_value("qk_norm", True)
        for name in ("mlp_bias", "post_norm"):
            self.config.check_value(name, False)
