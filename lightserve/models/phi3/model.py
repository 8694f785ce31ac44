"""Phi-3, 3.5, 4 and 4-mini: Llama with fused linears, longrope and a window in all layers."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError

LAYER_NAMES = bm.LayerNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
ROPE_TYPES = ("default", "longrope")


class Phi3TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), names=LAYER_NAMES, window=self.config.window)

    def _verify_params(self) -> None:
        rope_type = self.config.rope.rope_type
        if rope_type not in ROPE_TYPES:
            raise ModelFilesError(
                f"config.json: rope type {rope_type!r} is not supported for phi3; supported: {ROPE_TYPES}"
            )
        for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
            self.config.check_value(key, False)
