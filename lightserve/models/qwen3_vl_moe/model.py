"""The language model of Qwen3-VL MoE: Qwen3-MoE, whose published files store the experts of a layer in two tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.qwen3_moe.model import Qwen3MoeTpPartModel


class Qwen3VlMoeTpPartModel(Qwen3MoeTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        if spec.moe is None:
            return spec
        route = replace(spec.moe.route, renormalize=True)  # norm_topk_prob is not read
        return replace(spec, moe=replace(spec.moe, route=route))

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        width = self.config.count("moe_intermediate_size")
        return bm.with_experts_apart(super().adapt_checkpoint(checkpoint), self.config.hidden_size, width)
