"""StarCoder 1 and SantaCoder: GPT-2 with one KV head, and linears stored as usual."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.gpt2.model import Gpt2TpPartModel


class GptBigCodeTpPartModel(Gpt2TpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), qkv_layout=bm.QkvLayout.KV_GROUPS, is_transposed=False)
