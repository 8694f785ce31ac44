"""GPT-NeoX and Pythia: parallel halves with a LayerNorm each, partial rotary positions, q, k and v of each head."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="layers",
    qkv="attention.query_key_value",
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
MODEL_NAMES = bm.ModelNames(
    embedding="embed_in", final_norm="final_layer_norm", lm_head="embed_out", optional_prefix="gpt_neox."
)


class GptNeoxTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias", default=True)
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            is_parallel=self.config.flag("use_parallel_residual", default=True),
            qkv_layout=bm.QkvLayout.KV_GROUPS,
            qkv_bias=has_bias,
            o_bias=has_bias,
            is_gated=False,
            ffn_bias=True,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER)
