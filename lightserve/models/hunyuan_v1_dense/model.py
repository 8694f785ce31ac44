"""Hunyuan is Llama with a norm on every query and key head behind their rotation."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightserve.common import basemodel as bm, ops

LAYER_NAMES = bm.LayerNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


class HunyuanLayerInfer(bm.DecoderLayerInferTpl[bm.DecoderLayerWeight]):
    def _rotate_and_store(
        self, q: Tensor, cache_kv: Tensor, infer_state: bm.InferStateInfo, layer_weight: bm.DecoderLayerWeight
    ) -> None:
        ops.rotary(q, cache_kv[:, : self.num_kv_heads], *infer_state.rotary_angles[self._rotary_key])
        self._norm_qk(q, cache_kv, layer_weight)
        if self.spec.is_causal:
            ops.write_kv(cache_kv, infer_state.step.mem_index, self._kv_cache(infer_state, layer_weight))


class HunyuanTpPartModel(bm.TpPartBaseModel):
    transformer_layer_infer_class = HunyuanLayerInfer

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        has_bias = self.config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            qk_norm=bm.QkNorm.HEAD if self.config.flag("use_qk_norm", default=True) else None,
            qkv_bias=has_bias,
            o_bias=has_bias,
        )

    def _verify_params(self) -> None:
        self.config.check_value("use_cla", False)  # layers that share keys and values
        self.config.check_value("mlp_bias", False)
