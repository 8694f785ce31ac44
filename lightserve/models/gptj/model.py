"""GPT-J: one LayerNorm before parallel halves, interleaved rotary positions on a part of each head."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="h",
    att_norm="ln_1",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    o="attn.out_proj",
    ffn_norm=None,
    up="mlp.fc_in",
    down="mlp.fc_out",
)
MODEL_NAMES = bm.ModelNames(embedding="wte", final_norm="ln_f", optional_prefix="transformer.")


class GptJTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            is_parallel=True,
            has_rope_pairs=True,
            is_gated=False,
            ffn_bias=True,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER, head_bias=True)

    def _verify_params(self) -> None:
        self.config.count("rotary_dim")
