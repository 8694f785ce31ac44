"""Qwen3-Next: Gated DeltaNet in three of four layers, attention with an output gate in the others, experts in all."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from lightserve.common import basemodel as bm
from lightserve.models.qwen2_moe.model import is_sparse, qwen_moe_with_shared


class Qwen3NextTpPartModel(bm.TpPartBaseModel):
    unused_prefixes = ("mtp.",)
    mixer_names: ClassVar[bm.GatedDeltaNames] = bm.GatedDeltaNames(
        qkvz="linear_attn.in_proj_qkvz", ba="linear_attn.in_proj_ba"
    )

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, has_bias = self.config, self.config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            norm=bm.Norm.RMS_PLUS_ONE,
            qk_norm=bm.QkNorm.HEAD,
            qkv_bias=has_bias,
            o_bias=has_bias,
            has_output_gate=True,
            mixer=gated_delta_of(config, self.mixer_names) if config.is_recurrent(layer_num) else None,
            moe=self._moe(layer_num),
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(super().model_spec(), norm=bm.Norm.RMS_PLUS_ONE)

    def _verify_params(self) -> None:
        self.config.check_value("hidden_act", "silu", "swish")  # the convolution's too

    def _moe(self, layer_num: int) -> bm.MoeSpec | None:
        return qwen_moe_with_shared(self.config) if is_sparse(self.config, layer_num) else None


def gated_delta_of(config: bm.ModelConfig, names: bm.GatedDeltaNames) -> bm.GatedDeltaSpec:
    return bm.GatedDeltaSpec(
        num_key_heads=config.count("linear_num_key_heads"),
        num_value_heads=config.count("linear_num_value_heads"),
        key_dim=config.count("linear_key_head_dim"),
        value_dim=config.count("linear_value_head_dim"),
        conv_width=config.count("linear_conv_kernel_dim"),
        names=names,
    )
