"""Qwen3.5 MoE is Qwen3.5 with the experts of Qwen3-Next in every layer, stored in two tensors a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.qwen2_moe.model import qwen_moe_with_shared
from lightserve.models.qwen3_5.model import Qwen35TpPartModel


class Qwen35MoeTpPartModel(Qwen35TpPartModel):
    def _moe(self, layer_num: int) -> bm.MoeSpec:
        moe = qwen_moe_with_shared(self.config)
        return replace(moe, route=replace(moe.route, renormalize=True))  # norm_topk_prob is not read

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        width = self.config.count("moe_intermediate_size")
        return bm.with_experts_apart(super().adapt_checkpoint(checkpoint), self.config.hidden_size, width)
