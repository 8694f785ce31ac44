"""MPT: ALiBi, LayerNorm without bias, optional limits on the values of q, k and v."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="blocks",
    att_norm="norm_1",
    qkv="attn.Wqkv",
    o="attn.out_proj",
    ffn_norm="norm_2",
    up="ffn.up_proj",
    down="ffn.down_proj",
)
MODEL_NAMES = bm.ModelNames(embedding="wte", final_norm="norm_f", optional_prefix="transformer.")
# fields with the values that are implemented; those of attn_config come first
SUPPORTED = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "qk_ln": (False,),
    "prefix_lm": (False,),
    "attn_uses_sequence_id": (False,),
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}


class MptTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, spec = self.config, super().layer_spec(layer_num)
        return replace(
            spec,
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER_NO_BIAS,
            rope=None,
            alibi_slopes=bm.alibi_slopes(config.num_heads, config.number("alibi_bias_max", default=8)),
            scale=config.optional_number("softmax_scale") or spec.scale,
            clip_qkv=config.optional_number("clip_qkv"),
            is_gated=False,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER_NO_BIAS)

    def _verify_params(self) -> None:
        for key, values in SUPPORTED.items():
            self.config.check_value(key, *values)
        self.config.check_value("logit_scale")
        self.config.count("expansion_ratio", default=4)
