"""Qwen3.5 is Qwen3-Next without experts; its files store the projections of a recurrent layer apart."""

from __future__ import annotations

from lightserve.common import basemodel as bm
from lightserve.models.qwen3_next.model import Qwen3NextTpPartModel


class Qwen35TpPartModel(Qwen3NextTpPartModel):
    mixer_names = bm.GatedDeltaNames()

    def _moe(self, layer_num: int) -> bm.MoeSpec | None:
        return None
