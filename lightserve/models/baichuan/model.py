"""Baichuan is Llama with q, k and v in one tensor; 13B has ALiBi, Baichuan 2 a head with rows of length 1."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(qkv="self_attn.W_pack")


class BaichuanTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = replace(super().layer_spec(layer_num), names=LAYER_NAMES)
        if not self.config.flag("uses_alibi"):
            return spec
        return replace(spec, rope=None, alibi_slopes=bm.alibi_slopes(spec.num_heads))

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), normalizes_head=self.config.flag("normalizes_head"))
