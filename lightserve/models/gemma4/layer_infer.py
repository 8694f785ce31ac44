"""How the layers of Gemma 4 compute what other decoders do not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.models.gemma4.weights import Gemma4LayerWeight, Gemma4PreAndPostWeight


class Gemma4InferState(bm.InferStateInfo):
    def __init__(self, step: bm.ModelInput, mem_manager: bm.MemoryManager) -> None:
        super().__init__(step, mem_manager)
        self.per_layer_inputs: Tensor | None = None  # [tokens, layers, size]
        # by kind of layer: the step's keys and values, [tokens, 2 * kv_heads, dim], of the last layer that computed any
        self.step_kv: dict[str, Tensor] = {}
        self._causal_attn: ops.AttnBatch | None = None

    @property
    def causal_attn(self) -> ops.AttnBatch:
        """Of layers without a window: there, tokens of images see no later ones. All of them read the same pool."""
        if self.attn.see_until is None:
            return self.attn
        if self._causal_attn is None:
            self._causal_attn = replace(self.attn, see_until=None, plans={})
        return self._causal_attn


class Gemma4PreLayerInfer(bm.PreLayerInferTpl):
    def _embed(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: bm.DecoderPreAndPostWeight) -> Tensor:
        assert isinstance(infer_state, Gemma4InferState)
        assert isinstance(layer_weight, Gemma4PreAndPostWeight)
        x = super()._embed(input, infer_state, layer_weight)
        if layer_weight.per_layer_inputs is not None:
            images = infer_state.step.images
            if images is not None:
                input = input.masked_fill(images.vector_row >= 0, layer_weight.per_layer_inputs.image_id)
            infer_state.per_layer_inputs = layer_weight.per_layer_inputs.forward(input, x)
        return x


class Gemma4LayerInfer(bm.DecoderLayerInferTpl[Gemma4LayerWeight]):
    def __init__(self, spec: bm.LayerSpec, tp: bm.RankGroup) -> None:
        super().__init__(spec, tp)
        self._kind = spec.config.layer_type(spec.layer_num)

    def _forward(
        self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: Gemma4LayerWeight, is_prefill: bool
    ) -> Tensor:
        out = super()._forward(input, infer_state, layer_weight, is_prefill)
        return self._with_per_layer_input(out, infer_state, layer_weight)

    def _with_per_layer_input(
        self, out: Tensor, infer_state: bm.InferStateInfo, layer_weight: Gemma4LayerWeight
    ) -> Tensor:
        """Add what comes of the layer's own input, and scale the sum: the hidden states as a whole."""
        assert isinstance(infer_state, Gemma4InferState)
        assert infer_state.residual is not None
        if layer_weight.per_layer_input is not None:
            assert infer_state.per_layer_inputs is not None
            x = infer_state.residual.add_(out)
            out = layer_weight.per_layer_input.forward(x, infer_state.per_layer_inputs[:, self.layer_num])
        scalar = layer_weight.layer_scalar.tensor
        infer_state.residual.mul_(scalar)
        return out * scalar

    def _split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        heads = qkv.view(len(qkv), -1, self.spec.head_dim)
        if self.spec.kv_source is not None:
            return heads, heads[:, :0]
        if self.spec.has_v_proj:
            return super()._split_qkv(qkv)
        q, k = heads.split_with_sizes([self.num_heads, self.num_kv_heads], dim=1)
        return q, torch.cat((k, k), dim=1)

    def _rotate_and_store(
        self, q: Tensor, cache_kv: Tensor, infer_state: bm.InferStateInfo, layer_weight: Gemma4LayerWeight
    ) -> None:
        assert isinstance(infer_state, Gemma4InferState)
        if self.spec.kv_source is not None:
            self._norm_qk(q, cache_kv, layer_weight)
            ops.rotary(q, cache_kv, *infer_state.rotary_angles[self._rotary_key])
            return
        values = cache_kv[:, self.num_kv_heads :]
        values.copy_(ops.rms_norm(values, layer_weight.v_norm, self.spec.norm_eps))
        super()._rotate_and_store(q, cache_kv, infer_state, layer_weight)
        infer_state.step_kv[self._kind] = cache_kv

    def _context_attention_kernel(
        self, q: Tensor, cache_kv: Tensor, infer_state: bm.InferStateInfo, layer_weight: Gemma4LayerWeight
    ) -> Tensor:
        assert isinstance(infer_state, Gemma4InferState)
        step_kv, cache = infer_state.step_kv[self._kind], self._kv_cache(infer_state, layer_weight)
        batch = infer_state.causal_attn if self.spec.window is None else infer_state.attn
        return ops.context_attention(q, step_kv, cache, batch, layer_weight.attn_options)

    def _ffn(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: Gemma4LayerWeight) -> Tensor:
        return self._with_experts(super()._ffn(input, infer_state, layer_weight), infer_state, layer_weight)

    def _fused_norm_ffn(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: Gemma4LayerWeight) -> Tensor:
        return self._with_experts(super()._fused_norm_ffn(input, infer_state, layer_weight), infer_state, layer_weight)

    def _with_experts(self, out: Tensor, infer_state: bm.InferStateInfo, layer_weight: Gemma4LayerWeight) -> Tensor:
        """The experts read the hidden states that the norm before the feed-forward reads."""
        if layer_weight.moe is None:
            return out
        assert infer_state.residual is not None
        routed = layer_weight.moe.forward(infer_state.residual, infer_state.expert_rows)
        return layer_weight.dense_post_norm.norm(out) + layer_weight.moe_post_norm.norm(routed)
