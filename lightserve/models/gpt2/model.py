"""GPT-2: learned positions, LayerNorm, linears stored as [in, out]."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="h",
    att_norm="ln_1",
    qkv="attn.c_attn",
    o="attn.c_proj",
    ffn_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
MODEL_NAMES = bm.ModelNames(embedding="wte", positions="wpe", final_norm="ln_f", optional_prefix="transformer.")


class Gpt2TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        scale = config.head_dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
        if config.flag("scale_attn_by_inverse_layer_idx"):
            scale /= layer_num + 1
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            rope=None,
            scale=scale,
            qkv_bias=True,
            o_bias=True,
            is_gated=False,
            ffn_bias=True,
            is_transposed=True,
        )

    def model_spec(self) -> bm.ModelSpec:
        positions = self.config.max_position
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER, num_positions=positions)

    def _verify_params(self) -> None:
        self.config.check_value("add_cross_attention", False)
