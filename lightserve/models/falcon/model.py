"""Falcon: LayerNorm before parallel halves, KV heads for groups of queries; the first models have ALiBi."""

from __future__ import annotations

from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.models.bloom.model import LAYER_NAMES

ONE_NORM = replace(LAYER_NAMES, ffn_norm=None)
TWO_NORMS = replace(LAYER_NAMES, att_norm="ln_attn", ffn_norm="ln_mlp")
MODEL_NAMES = bm.ModelNames(embedding="word_embeddings", final_norm="ln_f", optional_prefix="transformer.")


class FalconTpPartModel(bm.TpPartBaseModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, spec = self.config, super().layer_spec(layer_num)
        has_bias, has_alibi = config.flag("bias"), config.flag("alibi")
        slopes = tuple(slope * spec.scale for slope in bm.alibi_slopes(config.num_heads))  # Falcon scales them too
        return replace(
            spec,
            names=self._names(),
            norm=bm.Norm.LAYER,
            is_parallel=self._is_parallel,
            rope=None if has_alibi else spec.rope,
            alibi_slopes=slopes if has_alibi else None,
            qkv_layout=bm.QkvLayout.KV_GROUPS,
            qkv_bias=has_bias,
            o_bias=has_bias,
            is_gated=False,
            ffn_bias=has_bias,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), names=MODEL_NAMES, norm=bm.Norm.LAYER)

    @property
    def _is_new(self) -> bool:
        return self.config.flag("new_decoder_architecture")

    @property
    def _is_parallel(self) -> bool:
        return self.config.flag("parallel_attn", default=True)

    def _names(self) -> bm.LayerNames:
        num_norms = self.config.count("num_ln_in_parallel_attn", default=2 if self._is_new else 1)
        if not self._is_parallel:
            return LAYER_NAMES
        return TWO_NORMS if num_norms == 2 else ONE_NORM

    def _verify_params(self) -> None:
        self.config.check_value("num_ln_in_parallel_attn", *((1, 2) if self._is_new else (1,)))
        self.config.check_value("parallel_attn", *((True,) if self._is_new else (True, False)))
