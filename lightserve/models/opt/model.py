"""OPT: learned positions that start at row 2 of their table, LayerNorm, ReLU."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="decoder.layers",
    att_norm="self_attn_layer_norm",
    o="self_attn.out_proj",
    ffn_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)
MODEL_NAMES = bm.ModelNames(
    embedding="decoder.embed_tokens",
    positions="decoder.embed_positions",
    final_norm="decoder.final_layer_norm",
    optional_prefix="model.",
)


class OptTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("enable_bias", default=True)
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            rope=None,
            qkv_bias=has_bias,
            o_bias=has_bias,
            is_gated=False,
            ffn_bias=has_bias,
        )

    def model_spec(self) -> bm.ModelSpec:
        spec = replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER)
        return replace(spec, num_positions=self.config.max_position, position_offset=2)

    def _verify_params(self) -> None:
        self.config.check_value("do_layer_norm_before", True)  # False in OPT-350M
        self.config.check_value("word_embed_proj_dim", self.config.hidden_size)  # smaller in OPT-350M
        self.config.check_value("_remove_final_layer_norm", False)
        self.config.check_value("layer_norm_elementwise_affine", True)
