"""Falcon-H1: attention and Mamba2 in the same layer, side by side, and a factor for nearly every product."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.errors import ModelFilesError
from lightserve.models.bamba.model import LAYER_NAMES, MODEL_NAMES
from lightserve.models.granitemoehybrid.model import expanded_width, mamba2_of
from lightserve.models.llama.model import LlamaTpPartModel


class FalconH1LayerInfer(bm.DecoderLayerInferTpl[bm.DecoderLayerWeight]):
    def __init__(self, spec: bm.LayerSpec, tp: bm.RankGroup) -> None:
        super().__init__(spec, tp)
        self._gate_scale, self._down_scale = multipliers(spec.config, "mlp_multipliers", 2)
        self._input_scale = spec.config.number("attention_in_multiplier", 1.0)
        self._out_scale = spec.config.number("attention_out_multiplier", 1.0)

    def _get_qkv(
        self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: bm.DecoderLayerWeight
    ) -> tuple[Tensor, Tensor]:
        scaled = input if self._input_scale == 1.0 else input * self._input_scale
        return super()._get_qkv(scaled, infer_state, layer_weight)

    def _get_o(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: bm.DecoderLayerWeight) -> Tensor:
        o = super()._get_o(input, infer_state, layer_weight)
        return o if self._out_scale == 1.0 else o * self._out_scale

    def _ffn(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: bm.DecoderLayerWeight) -> Tensor:
        ffn = layer_weight.ffn
        assert isinstance(ffn, bm.GatedFfnWeight)
        gate_up = ffn.gate_up_proj.mm(input)
        gate_up[:, : gate_up.shape[1] // 2] *= self._gate_scale
        return ffn.down_proj.mm(ops.silu_and_mul(gate_up)) * self._down_scale


class FalconH1TpPartModel(LlamaTpPartModel):
    transformer_layer_infer_class = FalconH1LayerInfer

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        spec = super().layer_spec(layer_num)
        # a factor of the keys is one of their products with queries
        scale = spec.scale * self.config.number("key_multiplier", 1.0)
        return replace(spec, names=LAYER_NAMES, scale=scale, mixer=self._mixer())

    def model_spec(self) -> bm.ModelSpec:
        return replace(
            super().model_spec(),
            names=MODEL_NAMES,
            embedding_scale=self.config.number("embedding_multiplier", 1.0),
            logit_scale=self.config.number("lm_head_multiplier", 1.0),
        )

    def _mixer(self) -> bm.Mamba2Spec:
        config = self.config
        width = expanded_width(config) if config.hf["mamba_d_ssm"] is None else config.count("mamba_d_ssm")
        return replace(
            mamba2_of(config, width),
            has_norm=config.flag("mamba_rms_norm"),
            norms_groups=True,
            gates_first=not config.flag("mamba_norm_before_gate", default=True),
            has_out_bias=config.flag("projectors_bias"),
            input_scale=config.number("ssm_in_multiplier", 1.0),
            part_scales=multipliers(config, "ssm_multipliers", 5),
            out_scale=config.number("ssm_out_multiplier", 1.0),
        )

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("hidden_act", "silu", "swish")  # the convolution's too


def multipliers(config: bm.ModelConfig, key: str, count: int) -> tuple[float, ...]:
    values = config.hf.get(key)
    if values is None:
        return (1.0,) * count
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or not all(isinstance(value, int | float) for value in values):
        raise ModelFilesError(f"config.json: {key} is {values!r}, wanted a list of {count} numbers; correct it")
    return tuple(map(float, values))
