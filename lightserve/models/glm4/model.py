"""GLM-4-0414 is GLM with a second norm behind each half of a layer."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.glm.model import LAYER_NAMES as GLM_NAMES, GlmTpPartModel

LAYER_NAMES = replace(GLM_NAMES, att_post_norm="post_self_attn_layernorm", ffn_post_norm="post_mlp_layernorm")


class Glm4TpPartModel(GlmTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), names=LAYER_NAMES)
