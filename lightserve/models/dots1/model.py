"""dots.llm1: the attention of Qwen3, and the experts of DeepSeek V3 in most layers."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse
from lightserve.models.qwen3.model import Qwen3TpPartModel


class Dots1TpPartModel(Qwen3TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        return replace(spec, moe=deepseek_v3_moe(self.config)) if is_sparse(self.config, layer_num) else spec

    def _verify_params(self) -> None:
        self.config.check_value("scoring_func", "sigmoid", "noaux_tc")  # the published file says noaux_tc
        self.config.check_value("moe_layer_freq", 1)
