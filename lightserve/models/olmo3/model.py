"""OLMo 3 is OLMo 2 with a window in three of four layers. Only the other layers have scaled rotary positions."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.olmo2.model import Olmo2TpPartModel


class Olmo3TpPartModel(Olmo2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec, config = super().layer_spec(layer_num), self.config
        is_windowed = (layer_num + 1) % 4 != 0 if config.layer_types is None else config.is_windowed(layer_num)
        if not is_windowed:
            return spec
        unscaled = {**config.hf, "rope_scaling": None}
        return replace(spec, window=config.window, rope=bm.RopeConfig.from_hf(unscaled, "sliding_attention"))
