"""Qwen2 is Llama with biases on the query, key and value projections."""

from __future__ import annotations

from lightserve.common import basemodel as bm
from lightserve.models.llama.model import LlamaTpPartModel, LlamaTransformerLayerWeight


class Qwen2TransformerLayerWeight(LlamaTransformerLayerWeight):
    def _biases(self, config: bm.ModelConfig) -> tuple[bool, bool, bool]:
        return True, False, False


class Qwen2TpPartModel(LlamaTpPartModel):
    transformer_weight_class = Qwen2TransformerLayerWeight
