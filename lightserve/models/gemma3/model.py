"""Gemma 3: Gemma 2 with norms on every query and key head, and another rotary base in windowed layers.

As in transformers, attn_logit_softcapping has no effect.
"""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.gemma2.model import Gemma2TpPartModel


class Gemma3TextTpPartModel(Gemma2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        rope = bm.RopeConfig.from_hf(self.config.hf, self.config.layer_type(layer_num))
        spec = super().layer_spec(layer_num)
        window = spec.window
        if window is not None and self.config.flag("use_bidirectional_attention"):
            window = window // 2 + 1  # on each side, the token itself included
        return replace(spec, qk_norm=bm.QkNorm.HEAD, rope=rope, window=window, softcap=None)
