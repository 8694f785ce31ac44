"""Mistral and Ministral are Llama with a sliding window. Ministral 3 scales queries by their positions."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm


class MistralTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), window=self.config.window_of(layer_num))


class Ministral3TpPartModel(MistralTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(super().layer_spec(layer_num), query_scale=query_scale(self.config.rope))


def query_scale(rope: bm.RopeConfig) -> bm.QueryScale | None:
    return None if rope.query_beta is None else bm.QueryScale(rope.query_beta, rope.original_max_position)
