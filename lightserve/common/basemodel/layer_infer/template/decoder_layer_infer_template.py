"""A decoder layer as its spec declares it: one fused q, k, v projection, positions, attention, feed-forward."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.expert_rows import ExpertRows
from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.common.basemodel.layer_infer.fused_hooks import replaces
from lightserve.common.basemodel.layer_infer.template.transformer_layer_infer_template import (
    TransformerLayerInferTpl,
)
from lightserve.common.basemodel.layer_weights.decoder import DecoderLayerWeight
from lightserve.common.basemodel.rotary import rotary_key
from lightserve.common.basemodel.spec import LayerSpec
from lightserve.common.parallel import RankGroup

DecoderWeight = TypeVar("DecoderWeight", bound=DecoderLayerWeight)


class DecoderLayerInferTpl(TransformerLayerInferTpl[DecoderWeight, InferStateInfo]):
    def __init__(self, spec: LayerSpec, tp: RankGroup) -> None:
        super().__init__(spec, tp)
        self._rotary_key = rotary_key(spec)

    def _get_qkv(
        self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderWeight
    ) -> tuple[Tensor, Tensor]:
        return self._split_qkv(self._without_gate(layer_weight.qkv_proj.mm(input), infer_state))

    def _fused_norm_qkv(
        self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderWeight
    ) -> tuple[Tensor, Tensor]:
        residual, norm = infer_state.residual, layer_weight.att_norm
        assert residual is not None
        assert norm is not None
        qkv, infer_state.residual = layer_weight.qkv_proj.add_norm_mm(input, residual, norm)
        return self._split_qkv(self._without_gate(qkv, infer_state))

    def _without_gate(self, projected: Tensor, infer_state: InferStateInfo) -> Tensor:
        """The projection's output without the gate behind it, which is kept for ``_get_o``."""
        width = self.num_heads * self.spec.gate_dim
        if not width:
            return projected
        qkv, infer_state.output_gate = projected.split_with_sizes([projected.shape[1] - width, width], dim=1)
        return qkv

    def _split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        if self.spec.clip_qkv is not None:
            qkv.clamp_(-self.spec.clip_qkv, self.spec.clip_qkv)
        return self._split_heads(qkv)

    def _post_cache_kv(
        self, q: Tensor, cache_kv: Tensor, infer_state: InferStateInfo, layer_weight: DecoderWeight
    ) -> None:
        self._rotate_and_store(q, cache_kv, infer_state, layer_weight)
        if self.spec.query_scale is not None:
            q.mul_(infer_state.query_scales[self.spec.query_scale])

    def _rotate_and_store(
        self, q: Tensor, cache_kv: Tensor, infer_state: InferStateInfo, layer_weight: DecoderWeight
    ) -> None:
        angles = infer_state.rotary_angles.get(self._rotary_key)
        if not self.spec.is_causal:  # there is no cache
            self._norm_qk(q, cache_kv, layer_weight)
            if angles is not None:
                ops.rotary(q, cache_kv[:, : self.num_kv_heads], *angles)
            return
        has_fused = "_fused_norm_rotate" in self._fused_hooks
        if has_fused and angles is not None and layer_weight.head_norms is not None:
            self._fused_norm_rotate(q, cache_kv, infer_state, layer_weight)
            return
        self._norm_qk(q, cache_kv, layer_weight)
        slots, cache = infer_state.step.mem_index, self._kv_cache(infer_state, layer_weight)
        if angles is None:
            ops.write_kv(cache_kv, slots, cache)
        else:
            ops.rotary_write_kv(q, cache_kv, *angles, slots, cache)

    @replaces("_norm_qk")
    def _fused_norm_rotate(
        self, q: Tensor, cache_kv: Tensor, infer_state: InferStateInfo, layer_weight: DecoderWeight
    ) -> None:
        """``_norm_qk``, positions and the KV write in one op."""
        angles, norms = infer_state.rotary_angles[self._rotary_key], layer_weight.head_norms
        assert norms is not None
        slots, cache = infer_state.step.mem_index, self._kv_cache(infer_state, layer_weight)
        ops.norm_rotary_write_kv(q, cache_kv, norms, angles, slots, cache)

    def _norm_qk(self, q: Tensor, cache_kv: Tensor, layer_weight: DecoderWeight) -> None:
        """In place."""
        if layer_weight.q_norm is not None:
            q.copy_(layer_weight.q_norm.norm(q))
        if layer_weight.k_norm is not None:
            k = cache_kv[:, : self.num_kv_heads]
            k.copy_(layer_weight.k_norm.norm(k))

    def _ffn(self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderWeight) -> Tensor:
        return layer_weight.ffn.forward(input, _rows(infer_state, layer_weight))

    def _fused_norm_ffn(self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderWeight) -> Tensor:
        residual, norm = infer_state.residual, layer_weight.ffn_norm
        assert residual is not None
        assert norm is not None
        rows = _rows(infer_state, layer_weight)
        out, infer_state.residual = layer_weight.ffn.add_norm_forward(input, residual, norm, rows)
        return out


def _rows(infer_state: InferStateInfo, layer_weight: DecoderLayerWeight) -> ExpertRows | None:
    """For feed-forwards that read it only: to find the padding takes a launch in each step."""
    return infer_state.expert_rows if layer_weight.ffn.has_experts else None
