"""Mixtral is Mistral with experts; a token chooses some by softmax, and their weights add up to 1."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec

NAMES = bm.MoeNames(
    router="block_sparse_moe.gate",
    score_bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    expert=bm.ExpertNames(gate="w1", up="w3", down="w2"),
)


class MixtralTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        moe = bm.MoeSpec(
            num_experts=bm.num_experts_of(self.config),
            intermediate_size=self.config.intermediate_size,
            route=RouteSpec(bm.top_k_of(self.config), renormalize=True),
            names=NAMES,
        )
        return replace(super().layer_spec(layer_num), window=self.config.window, moe=moe)
