"""OLMo Hybrid: Gated DeltaNet in three of four layers, OLMo 2 without positions in the others."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.olmo2.model import Olmo2TpPartModel
from lightserve.models.qwen3_next.model import gated_delta_of

LAYER_NAMES = bm.LayerNames(att_norm="attention_layer_norm", ffn_norm="feedforward_layer_norm")
DELTA_NAMES = bm.GatedDeltaNames(
    parts=("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj"),
    convs=("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
    z="linear_attn.g_proj",
    b="linear_attn.b_proj",
    a="linear_attn.a_proj",
    norm="linear_attn.o_norm",
    out="linear_attn.o_proj",
)


class OlmoHybridTpPartModel(Olmo2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec, config = super().layer_spec(layer_num), self.config
        if not config.is_recurrent(layer_num):
            return spec if config.hf.get("rope_parameters") else replace(spec, rope=None)
        beta_scale = 2.0 if config.flag("linear_allow_neg_eigval", default=True) else 1.0
        mixer = replace(gated_delta_of(config, DELTA_NAMES), norm_eps=1e-5, beta_scale=beta_scale)
        return replace(spec, names=LAYER_NAMES, qk_norm=None, mixer=mixer)
