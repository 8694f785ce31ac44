"""Hy3: norms on every query and key head, and the experts of DeepSeek V3 in most layers."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse
from lightserve.models.llama.model import LlamaTpPartModel

NAMES = bm.MoeNames(router="mlp.router.gate", score_bias="mlp.expert_bias", shared="mlp.shared_mlp")


class HyV3TpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = replace(super().layer_spec(layer_num), qk_norm=bm.QkNorm.HEAD)
        if not is_sparse(self.config, layer_num):
            return spec
        return replace(spec, moe=replace(deepseek_v3_moe(self.config), names=NAMES))

    def _verify_params(self) -> None:
        self.config.check_value("mlp_bias", False)
        self.config.check_value("qk_norm", True)
