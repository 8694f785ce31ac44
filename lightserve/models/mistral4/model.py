"""Mistral 4: the latent attention of DeepSeek V3, queries scaled by their positions, and experts chosen by softmax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.deepseek.model import DeepseekTpPartModel
from lightserve.models.glm4_moe.model import deepseek_v3_moe
from lightserve.models.mistral.model import query_scale


class Mistral4TpPartModel(DeepseekTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        # partial_rotary_factor is the share of the rotary part in a head, and head_dim is already that part
        rope = replace(self.config.rope, partial_rotary_factor=1.0)
        return replace(spec, rope=rope, query_scale=query_scale(self.config.rope))

    def _moe(self) -> bm.MoeSpec:
        self.config.check_value("scoring_func", "softmax")
        moe = deepseek_v3_moe(self.config)
        route = replace(moe.route, score="softmax")
        return replace(moe, route=route, has_score_bias=False, is_router_float32=False)

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        width = self.config.count("moe_intermediate_size")
        return bm.with_experts_apart(super().adapt_checkpoint(checkpoint), self.config.hidden_size, width)
