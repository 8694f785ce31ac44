"""StarCoder 2: LayerNorm, biases, a plain GELU feed-forward and a window in all layers."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(up="mlp.c_fc", down="mlp.c_proj")


class Starcoder2TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("use_bias", default=True)
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            window=self.config.window,
            qkv_bias=has_bias,
            o_bias=has_bias,
            is_gated=False,
            ffn_bias=has_bias,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), norm=bm.Norm.LAYER)

    def _verify_params(self) -> None:
        self.config.check_value("norm_type", "layer_norm")
        self.config.check_value("mlp_type", "default")
