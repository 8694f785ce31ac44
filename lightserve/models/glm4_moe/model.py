"""GLM-4.5: partial rotary positions, query and key norms, and the experts of DeepSeek V3 in most layers."""

from __future__ import annotations

import reprlib
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.errors import ModelFilesError

DENSE, SPARSE = "dense", "sparse"


class Glm4MoeTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        is_sparse = layer_num >= self.config.count_or_0("first_k_dense_replace")
        return replace(
            super().layer_spec(layer_num),
            qk_norm=bm.QkNorm.HEAD if self.config.flag("use_qk_norm") else None,
            qkv_bias=self.config.flag("attention_bias"),
            moe=deepseek_v3_moe(self.config) if is_sparse else None,
        )


def deepseek_v3_moe(config: bm.ModelConfig) -> bm.MoeSpec:
    """Experts of the groups with the best pairs, by sigmoid and a bias; and shared experts."""
    width = config.count("moe_intermediate_size")
    route = RouteSpec(
        bm.top_k_of(config),
        "sigmoid",
        groups=config.count("n_group", default=1),
        top_groups=config.count("topk_group", default=1),
        group_score="top2",
        renormalize=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
    )
    return bm.MoeSpec(
        num_experts=bm.num_experts_of(config),
        intermediate_size=width,
        route=route,
        is_router_float32=True,
        has_score_bias=True,
        shared_size=width * config.count_or_0("n_shared_experts"),
    )


def is_sparse(config: bm.ModelConfig, layer_num: int) -> bool:
    """Whether a layer has experts: as mlp_layer_types lists it, or behind the first first_k_dense_replace layers."""
    kinds, count = config.hf.get("mlp_layer_types"), config.num_layers
    if kinds is None:
        return layer_num >= config.count_or_0("first_k_dense_replace")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (DENSE, SPARSE) for kind in kinds):
        actual, wanted = reprlib.repr(kinds), f"a list of {count} times {DENSE!r} or {SPARSE!r}"
        raise ModelFilesError(f"config.json: mlp_layer_types is {actual}, wanted {wanted}; correct it")
    return bool(kinds[layer_num] == SPARSE)
