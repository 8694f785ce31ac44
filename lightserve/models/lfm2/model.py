"""LFM2: short convolutions in most layers, attention with normed queries and keys in the others."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    att_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    ffn_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)


class Lfm2TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        mixer = bm.ShortConvSpec(
            num_channels=config.hidden_size,
            conv_width=config.count("conv_L_cache"),
            has_bias=config.flag("conv_bias"),
        )
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            qk_norm=bm.QkNorm.HEAD,
            mixer=mixer if config.is_recurrent(layer_num) else None,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=bm.ModelNames(final_norm="model.embedding_norm"))

    def _verify_params(self) -> None:
        self.config.check_value("hidden_act", "silu")
