"""GLM-4.7-Flash: DeepSeek V3 in other sizes. Its config.json may list the layers that have experts."""

from __future__ import annotations

from lightserve.models.deepseek.model import DeepseekTpPartModel
from lightserve.models.glm4_moe.model import is_sparse


class Glm4MoeLiteTpPartModel(DeepseekTpPartModel):
    def _is_sparse(self, layer_num: int) -> bool:
        is_listed = self.config.hf.get("mlp_layer_types") is not None
        return is_sparse(self.config, layer_num) if is_listed else super()._is_sparse(layer_num)
