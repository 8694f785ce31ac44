"""OLMo 2: norms behind the halves of a layer, and norms over all queries and all keys of a token."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.llama.model import LlamaTpPartModel

LAYER_NAMES = bm.LayerNames(
    att_norm=None,
    att_post_norm="post_attention_layernorm",
    ffn_norm=None,
    ffn_post_norm="post_feedforward_layernorm",
)


class Olmo2TpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), names=LAYER_NAMES, qk_norm=bm.QkNorm.PROJECTION)
