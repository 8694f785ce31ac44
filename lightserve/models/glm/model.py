"""GLM is Llama with rotary pairs in half of each head, biases on q, k and v, and gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(gate_up="mlp.gate_up_proj")


class GlmTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            has_rope_pairs=True,
            qkv_bias=self.config.flag("attention_bias", True),
        )
