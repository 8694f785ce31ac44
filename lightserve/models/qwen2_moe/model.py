"""Qwen2-MoE is Qwen2 with experts, and a shared expert behind a gate of its own, in some layers or in all."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.errors import ModelFilesError
from lightserve.models.qwen2.model import Qwen2TpPartModel

NAMES = bm.MoeNames(shared="mlp.shared_expert")


class Qwen2MoeTpPartModel(Qwen2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = replace(super().layer_spec(layer_num), qkv_bias=self.config.flag("qkv_bias", default=True))
        if not is_sparse(self.config, layer_num):
            return spec
        return replace(spec, moe=qwen_moe_with_shared(self.config))


def qwen_moe(config: bm.ModelConfig) -> bm.MoeSpec:
    return bm.MoeSpec(
        num_experts=bm.num_experts_of(config),
        intermediate_size=config.count("moe_intermediate_size"),
        route=RouteSpec(bm.top_k_of(config), renormalize=config.flag("norm_topk_prob")),
    )


def qwen_moe_with_shared(config: bm.ModelConfig) -> bm.MoeSpec:
    shared_size = config.count("shared_expert_intermediate_size")
    return replace(qwen_moe(config), names=NAMES, shared_size=shared_size, has_shared_gate=True)


def is_sparse(config: bm.ModelConfig, layer_num: int) -> bool:
    """Whether a layer has experts."""
    dense = config.hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
        raise ModelFilesError(f"config.json: mlp_only_layers is {dense!r}, wanted a list of layer numbers; correct it")
    return layer_num not in dense and (layer_num + 1) % config.count("decoder_sparse_step", default=1) == 0
