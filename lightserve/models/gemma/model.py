"""Gemma: norms with 1 + weight, scaled embeddings, a gated GELU feed-forward."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightserve.common import basemodel as bm


class GemmaTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias")
        return replace(super().layer_spec(layer_num), norm=bm.Norm.RMS_PLUS_ONE, qkv_bias=has_bias, o_bias=has_bias)

    def model_spec(self) -> bm.ModelSpec:
        # the factor was rounded to the model's dtype in training
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.args.dtype)
        return replace(super().model_spec(), norm=bm.Norm.RMS_PLUS_ONE, embedding_scale=scale.item())

    def _verify_params(self) -> None:
        if self.args.pooling is None:
            self.config.check_value("use_bidirectional_attention", False)
