"""Ling and Ring: Llama with one linear for q, k and v, and experts. Ling 2 has the norms and experts of GLM-4.5."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse

LAYER_NAMES = bm.LayerNames(
    qkv="attention.query_key_value",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    o="attention.dense",
)
MODEL_NAMES = bm.ModelNames(embedding="model.word_embeddings")
NAMES = bm.MoeNames(score_bias="mlp.gate.expert_bias")


class BailingMoeTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            qkv_bias=config.flag("use_qkv_bias"),
            moe=self._moe() if is_sparse(config, layer_num) else None,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES)

    def _moe(self) -> bm.MoeSpec:
        moe = deepseek_v3_moe(self.config)
        route = replace(moe.route, score="softmax", groups=1, top_groups=1)
        return replace(moe, route=route, has_score_bias=False, is_router_float32=False)

    def _verify_params(self) -> None:
        for name in ("use_bias", "use_sliding_window", "multi_gate", "norm_head"):
            self.config.check_value(name, False)
        shared_size = self.config.count("moe_intermediate_size") * self.config.count_or_0("n_shared_experts")
        self.config.check_value("moe_shared_expert_intermediate_size", shared_size)


class BailingMoeV2TpPartModel(BailingMoeTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_norms = self.config.flag("use_qk_norm", default=True)
        return replace(super().layer_spec(layer_num), qk_norm=bm.QkNorm.HEAD if has_norms else None)

    def _moe(self) -> bm.MoeSpec:
        has_bias = self.config.flag("moe_router_enable_expert_bias", default=True)
        return replace(deepseek_v3_moe(self.config), names=NAMES, has_score_bias=has_bias)

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("score_function", "sigmoid")
