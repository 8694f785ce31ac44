"""Cohere Command R7B and A: Command R with a window in most layers. Only these layers have rotary positions."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.cohere.model import CohereTpPartModel


class Cohere2TpPartModel(CohereTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        if self.config.is_windowed(layer_num):
            return replace(spec, window=self.config.window)
        return replace(spec, rope=None)

    def _verify_params(self) -> None:
        self.config.check_value("use_qk_norm", False)
