"""A.X K1 is DeepSeek V3 with a norm of what experts add."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.deepseek.model import DeepseekTpPartModel
from lightserve.models.glm4_moe.model import is_sparse

SPARSE_NAMES = bm.LayerNames(ffn_post_norm="post_mlp_layernorm")


class AXK1TpPartModel(DeepseekTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        return spec if spec.moe is None else replace(spec, names=SPARSE_NAMES)

    def _is_sparse(self, layer_num: int) -> bool:
        return is_sparse(self.config, layer_num)

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("moe_layer_freq", 1)
