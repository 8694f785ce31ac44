"""Qwen3-MoE is Qwen3 with experts in some layers or in all."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.qwen2_moe.model import is_sparse, qwen_moe
from lightserve.models.qwen3.model import Qwen3TpPartModel


class Qwen3MoeTpPartModel(Qwen3TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        return replace(spec, moe=qwen_moe(self.config)) if is_sparse(self.config, layer_num) else spec
