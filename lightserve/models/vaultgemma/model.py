"""VaultGemma is Gemma 2 without norms behind the halves of a layer."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.gemma2.model import Gemma2TpPartModel

LAYER_NAMES = bm.LayerNames(ffn_norm="pre_feedforward_layernorm")


class VaultGemmaTpPartModel(Gemma2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), names=LAYER_NAMES)
