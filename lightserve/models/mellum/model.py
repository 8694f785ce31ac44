"""Mellum 2 is Qwen3-MoE with windows in some layers, which have a rotary base of their own."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.glm4_moe.model import is_sparse
from lightserve.models.qwen2_moe.model import qwen_moe
from lightserve.models.qwen3.model import Qwen3TpPartModel


class MellumTpPartModel(Qwen3TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        return replace(
            super().layer_spec(layer_num),
            rope=bm.RopeConfig.from_hf(config.hf, config.layer_type(layer_num)),
            moe=qwen_moe(config) if is_sparse(config, layer_num) else None,
        )
