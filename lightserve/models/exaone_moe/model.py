"""K-EXAONE: the attention of EXAONE 4, norms before the halves, and the experts of DeepSeek V3 in most layers."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.exaone4.model import Exaone4TpPartModel
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse

LAYER_NAMES = bm.LayerNames()
NAMES = bm.MoeNames(score_bias="mlp.e_score_correction_bias")


class ExaoneMoeTpPartModel(Exaone4TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = replace(super().layer_spec(layer_num), names=LAYER_NAMES)
        if not is_sparse(self.config, layer_num):
            return spec
        return replace(spec, moe=replace(deepseek_v3_moe(self.config), names=NAMES))

    def _verify_params(self) -> None:
        self.config.check_value("scoring_func", "sigmoid")
        self.config.check_value("topk_method", "noaux_tc")
