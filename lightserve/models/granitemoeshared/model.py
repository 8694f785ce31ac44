"""GraniteMoE with shared experts beside the others."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.granitemoe.model import NAMES, GraniteMoeTpPartModel

MOE_NAMES = replace(NAMES, shared="shared_mlp", shared_gate_up="input_linear")


class GraniteMoeSharedTpPartModel(GraniteMoeTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        assert spec.moe is not None
        shared_size = self.config.count_or_0("shared_intermediate_size")
        return replace(spec, moe=replace(spec.moe, names=MOE_NAMES, shared_size=shared_size))
