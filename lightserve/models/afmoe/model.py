"""Trinity: Llama with norms around both halves, a gate behind attention, and positions in windowed layers only.

Behind the first layers it has experts, which tokens choose as in DeepSeek V3.
"""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse

LAYER_NAMES = bm.LayerNames(
    output_gate="self_attn.gate_proj",
    att_post_norm="post_attention_layernorm",
    ffn_norm="pre_mlp_layernorm",
    ffn_post_norm="post_mlp_layernorm",
)
NAMES = bm.MoeNames(router="mlp.router.gate", score_bias="mlp.expert_bias")


class AfmoeTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, has_bias = self.config, self.config.flag("attention_bias")
        window = config.window_of(layer_num)
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            qk_norm=bm.QkNorm.HEAD,
            qkv_bias=has_bias,
            o_bias=has_bias,
            has_output_gate=True,
            window=window,
            rope=None if window is None else config.rope,
            moe=self._moe() if is_sparse(config, layer_num) else None,
        )

    def model_spec(self) -> bm.ModelSpec:
        scale = self.config.hidden_size**0.5 if self.config.flag("mup_enabled") else 1.0
        return replace(super().model_spec(), embedding_scale=scale)

    def _moe(self) -> bm.MoeSpec:
        return replace(deepseek_v3_moe(self.config), names=NAMES, is_router_float32=False)

    def _verify_params(self) -> None:
        for name, value in {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "attention_bias": False}.items():
            self.config.check_value(name, value)
