"""Granite with windows in most layers, sinks in all, and a rotary base for each layer, or no positions."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.errors import ModelFilesError
from lightserve.models.granite.model import GraniteTpPartModel


class GraniteSwaTpPartModel(GraniteTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return with_windows(super().layer_spec(layer_num))


def with_windows(spec: bm.LayerSpec) -> bm.LayerSpec:
    config, layer_num = spec.config, spec.layer_num
    return replace(
        spec, window=config.window if config.is_windowed(layer_num) else None, has_sinks=True, rope=_rope(spec)
    )


def _rope(spec: bm.LayerSpec) -> bm.RopeConfig | None:
    bases = spec.config.hf.get("layer_rope_theta")
    if bases is None or spec.rope is None:
        return spec.rope
    count = spec.config.num_layers
    if not isinstance(bases, list) or len(bases) != count or not all(isinstance(base, int | float) for base in bases):
        raise ModelFilesError(f"config.json: layer_rope_theta is {bases!r}, wanted {count} numbers; correct it")
    base = bases[spec.layer_num]
    return replace(spec.rope, theta=float(base)) if base else None
