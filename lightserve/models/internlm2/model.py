"""InternLM 2 is Llama with q, k and v in one tensor, by KV heads, and with other names."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    att_norm="attention_norm",
    qkv="attention.wqkv",
    o="attention.wo",
    ffn_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)
MODEL_NAMES = bm.ModelNames(embedding="model.tok_embeddings", lm_head="output")


class InternLm2TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("bias", True)
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            qkv_layout=bm.QkvLayout.KV_GROUPS,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES)
