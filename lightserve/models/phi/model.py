"""Phi 1, 1.5 and 2: one LayerNorm before parallel halves, partial rotary positions, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(o="self_attn.dense", ffn_norm=None, up="mlp.fc1", down="mlp.fc2")
MODEL_NAMES = bm.ModelNames(final_norm="model.final_layernorm")


class PhiTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            is_parallel=True,
            qkv_bias=True,
            o_bias=True,
            is_gated=False,
            ffn_bias=True,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER, head_bias=True)

    def _verify_params(self) -> None:
        self.config.check_value("qk_layernorm", False)
