"""Qwen (1) is Qwen2 with q, k and v in one tensor and with other names; its w2 is the gate."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="transformer.h",
    att_norm="ln_1",
    qkv="attn.c_attn",
    o="attn.c_proj",
    ffn_norm="ln_2",
    gate="mlp.w2",
    up="mlp.w1",
    down="mlp.c_proj",
)
MODEL_NAMES = bm.ModelNames(embedding="transformer.wte", final_norm="transformer.ln_f")


class QwenTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = not self.config.flag("no_bias", True)
        spec = super().layer_spec(layer_num)
        return replace(spec, names=LAYER_NAMES, qkv_bias=True, o_bias=has_bias, ffn_bias=has_bias)

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES)

    def _verify_params(self) -> None:
        self.config.check_value("scale_attn_weights", True)
