"""GLM-4.7-Flash: DeepSeek V3 in other sizes. Its config.json may list the layers that have experts."""

from __future__ import annotations

import reprlib

from lightserve.errors import ModelFilesError
from lightserve.models.deepseek.model import DeepseekTpPartModel

DENSE, SPARSE = "dense", "sparse"


class Glm4MoeLiteTpPartModel(DeepseekTpPartModel):
    def _is_sparse(self, layer_num: int) -> bool:
        kinds, count = self.config.hf.get("mlp_layer_types"), self.config.num_layers
        if kinds is None:
            return super()._is_sparse(layer_num)
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (DENSE, SPARSE) for kind in kinds):
            actual, wanted = reprlib.repr(kinds), f"a list of {count} times {DENSE!r} or {SPARSE!r}"
            raise ModelFilesError(f"config.json: mlp_layer_types is {actual}, wanted {wanted}; correct it")
        return bool(kinds[layer_num] == SPARSE)
