"""BLOOM: ALiBi instead of rotary positions, LayerNorm, a biased GELU feed-forward, a norm on the embedding."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="h",
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
MODEL_NAMES = bm.ModelNames(
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    final_norm="ln_f",
    optional_prefix="transformer.",
)


class BloomTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            rope=None,
            alibi_slopes=bm.alibi_slopes(self.config.num_heads),
            qkv_layout=bm.QkvLayout.KV_GROUPS,
            qkv_bias=True,
            o_bias=True,
            is_gated=False,
            ffn_bias=True,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER)

    def _verify_params(self) -> None:
        self.config.check_value("apply_residual_connection_post_layernorm", False)
