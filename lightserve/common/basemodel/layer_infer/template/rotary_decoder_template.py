"""What decoders with rotary positions and a gated SiLU feed-forward share: Llama, Qwen and their relatives."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_infer.template.transformer_layer_infer_template import (
    TransformerLayerInferTpl,
)
from lightserve.common.basemodel.layer_weights.layer_weight import TransformerLayerWeight
from lightserve.common.basemodel.layer_weights.weights import ColumnWeight, RowWeight
from lightserve.common.basemodel.rotary import RotaryInferStateInfo


class RotaryDecoderLayerWeight(TransformerLayerWeight):
    """The weights that the template reads. A model creates them and adds its own."""

    qkv_proj: ColumnWeight  # q, k and v
    gate_up_proj: ColumnWeight  # gate and up
    down_proj: RowWeight


DecoderWeight = TypeVar("DecoderWeight", bound=RotaryDecoderLayerWeight)


class RotaryDecoderLayerInferTpl(TransformerLayerInferTpl[DecoderWeight, RotaryInferStateInfo]):
    fuses_att_norm = True
    fuses_ffn_norm = True

    def _get_qkv(
        self, input: Tensor, infer_state: RotaryInferStateInfo, layer_weight: DecoderWeight
    ) -> tuple[Tensor, Tensor]:
        return self._split_heads(layer_weight.qkv_proj.mm(input))

    def _fused_norm_qkv(
        self, input: Tensor, infer_state: RotaryInferStateInfo, layer_weight: DecoderWeight
    ) -> tuple[Tensor, Tensor]:
        residual = infer_state.residual
        assert residual is not None
        qkv, infer_state.residual = layer_weight.qkv_proj.add_norm_mm(input, residual, layer_weight.att_norm)
        return self._split_heads(qkv)

    def _post_cache_kv(
        self, q: Tensor, cache_kv: Tensor, infer_state: RotaryInferStateInfo, layer_weight: DecoderWeight
    ) -> None:
        angles = infer_state.position_cos, infer_state.position_sin
        cache = infer_state.mem_manager.layer(self.layer_num)
        ops.rotary_write_kv(q, cache_kv, *angles, infer_state.step.mem_index, cache)

    def _ffn(self, input: Tensor, infer_state: RotaryInferStateInfo, layer_weight: DecoderWeight) -> Tensor:
        return layer_weight.down_proj.mm(ops.silu_and_mul(layer_weight.gate_up_proj.mm(input)))

    def _fused_norm_ffn(self, input: Tensor, infer_state: RotaryInferStateInfo, layer_weight: DecoderWeight) -> Tensor:
        residual = infer_state.residual
        assert residual is not None
        gated, infer_state.residual = layer_weight.gate_up_proj.add_norm_gate_up(input, residual, layer_weight.ffn_norm)
        return layer_weight.down_proj.mm(gated)
