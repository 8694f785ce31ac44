"""EXAONE 4: norms behind the halves of a layer, norms of queries and keys, rotary positions in windowed layers only."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError
from lightserve.models.olmo2.model import LAYER_NAMES


class Exaone4TpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config = self.config
        window = config.window if self._is_windowed(layer_num) else None
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            qk_norm=bm.QkNorm.HEAD,
            window=window,
            rope=config.rope if config.window is None or window is not None else None,
        )

    def _is_windowed(self, layer_num: int) -> bool:
        """Files that lack layer_types have a pattern: "LLLG" and 4 both make every fourth layer global."""
        if self.config.layer_types is not None:
            return self.config.is_windowed(layer_num)
        pattern = self.config.hf.get("sliding_window_pattern", 4)
        if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
            return pattern[layer_num % len(pattern)] == "L" and layer_num < self.config.num_layers - 1
        if isinstance(pattern, int) and pattern > 0:
            return (layer_num + 1) % pattern != 0
        raise ModelFilesError(
            f"config.json: sliding_window_pattern {pattern!r} is not supported; supported: a number, or L and G"
        )
