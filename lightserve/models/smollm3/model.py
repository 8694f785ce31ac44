"""SmolLM3 is Llama without rotary positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError
from lightserve.models.llama.model import LlamaTpPartModel


class SmolLM3TpPartModel(LlamaTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, spec = self.config, super().layer_spec(layer_num)
        has_rope = self._has_rope(layer_num)
        is_windowed = not has_rope if config.layer_types is None else config.is_windowed(layer_num)
        return replace(spec, rope=config.rope if has_rope else None, window=config.window if is_windowed else None)

    def _has_rope(self, layer_num: int) -> bool:
        flags = self.config.hf.get("no_rope_layers")
        if flags is None:
            return (layer_num + 1) % self.config.count("no_rope_layer_interval", 4) != 0
        if (
            not isinstance(flags, list)
            or len(flags) < self.config.num_layers
            or any(flag not in (0, 1) for flag in flags)
        ):
            raise ModelFilesError(
                f"config.json: no_rope_layers is {flags!r}, wanted 0 or 1 for each of {self.config.num_layers} layers"
            )
        return bool(flags[layer_num])
