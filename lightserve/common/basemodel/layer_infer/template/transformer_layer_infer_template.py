"""A transformer layer as a sequence of hooks. A model overrides the hooks in which it differs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.common.basemodel.layer_infer.base_layer_infer import InnerWeight, State, TransformerLayerInfer
from lightserve.common.basemodel.layer_infer.fused_hooks import replaces, usable_fused_hooks
from lightserve.common.basemodel.layer_weights.norms import NormWeight
from lightserve.common.basemodel.spec import LayerSpec
from lightserve.common.parallel import RankGroup


class TransformerLayerInferTpl(TransformerLayerInfer[InnerWeight, State]):
    """Norm, attention, norm, feed-forward; each half's output is added to the residual by the norm that follows it.

    The spec may leave out a half or norms, add norms of what the halves return, scale that, or run both in parallel.
    Instead of attention or beside it, a layer may have a recurrent mixer.

    A layer class may replace several hooks by a fused one; see ``fused_hooks.py``.
    """

    def __init__(self, spec: LayerSpec, tp: RankGroup) -> None:
        super().__init__(spec, tp)
        self.num_heads = spec.num_heads // tp.size  # of this rank
        self.num_kv_heads = spec.kv_heads_of_rank(tp.size)
        self._fused_hooks = usable_fused_hooks(type(self))

    def context_forward(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        return self._forward(input, infer_state, layer_weight, is_prefill=True)

    def token_forward(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        return self._forward(input, infer_state, layer_weight, is_prefill=False)

    def _forward(self, input: Tensor, infer_state: State, layer_weight: InnerWeight, is_prefill: bool) -> Tensor:
        if self.spec.is_parallel:
            return self._parallel_forward(input, infer_state, layer_weight, is_prefill)
        if self.spec.is_post_norm:
            return self._post_norm_forward(input, infer_state, layer_weight, is_prefill)
        x = input
        if self.spec.mixer is not None and self.spec.has_attention:
            x = self._attention_and_mixer(x, infer_state, layer_weight, is_prefill)
        elif self.spec.mixer is not None:
            out = self._norm_and_mix(x, infer_state, layer_weight)
            x = self._added("mixer", out, layer_weight.att_post_norm, infer_state)
        elif self.spec.has_attention:
            q, cache_kv = self._norm_and_qkv(x, infer_state, layer_weight)
            x = self._attention(q, cache_kv, infer_state, layer_weight, is_prefill)
        if self.spec.has_ffn:
            out = self._norm_and_ffn(x, infer_state, layer_weight)
            x = self._added("ffn", out, layer_weight.ffn_post_norm, infer_state)
        return x

    def _parallel_forward(
        self, input: Tensor, infer_state: State, layer_weight: InnerWeight, is_prefill: bool
    ) -> Tensor:
        """Attention and feed-forward both read the hidden states before the layer, through one norm or two."""
        x = self._att_norm(input, infer_state, layer_weight)
        self._observe("att_norm", x, infer_state)
        q, cache_kv = self._get_qkv(x, infer_state, layer_weight)
        o = self._attention(q, cache_kv, infer_state, layer_weight, is_prefill)
        if layer_weight.ffn_norm is not None:
            assert infer_state.residual is not None
            x = layer_weight.ffn_norm.norm(infer_state.residual)
        self._observe("ffn_norm", x, infer_state)
        out = self._ffn(x, infer_state, layer_weight)
        return o + self._added("ffn", out, layer_weight.ffn_post_norm, infer_state)

    def _attention_and_mixer(
        self, input: Tensor, infer_state: State, layer_weight: InnerWeight, is_prefill: bool
    ) -> Tensor:
        """What both add to the hidden states. They read the same ones."""
        x = self._att_norm(input, infer_state, layer_weight)
        self._observe("att_norm", x, infer_state)
        q, cache_kv = self._get_qkv(x, infer_state, layer_weight)
        o = self._attention(q, cache_kv, infer_state, layer_weight, is_prefill)
        mixed = self._mix(x, infer_state, layer_weight)
        return o + self._added("mixer", mixed, layer_weight.att_post_norm, infer_state)

    def _post_norm_forward(
        self, input: Tensor, infer_state: State, layer_weight: InnerWeight, is_prefill: bool
    ) -> Tensor:
        """The hidden states themselves pass from layer to layer: each half is added to them, and a norm follows.

        ``infer_state.residual`` stays None.
        """
        att_norm, ffn_norm = layer_weight.att_post_norm, layer_weight.ffn_post_norm
        assert att_norm is not None
        assert ffn_norm is not None
        self._observe("att_norm", input, infer_state)
        q, cache_kv = self._get_qkv(input, infer_state, layer_weight)
        o = self._attended(q, cache_kv, infer_state, layer_weight, is_prefill)
        self._observe("o", o, infer_state)
        x = att_norm.add_norm(o, input)
        self._observe("ffn_norm", x, infer_state)
        out = self._ffn(x, infer_state, layer_weight)
        self._observe("ffn", out, infer_state)
        return ffn_norm.add_norm(out, x)

    def _attention(
        self, q: Tensor, cache_kv: Tensor, infer_state: State, layer_weight: InnerWeight, is_prefill: bool
    ) -> Tensor:
        """What the attention adds to the hidden states."""
        o = self._attended(q, cache_kv, infer_state, layer_weight, is_prefill)
        return self._added("o", o, layer_weight.att_post_norm, infer_state)

    def _attended(
        self, q: Tensor, cache_kv: Tensor, infer_state: State, layer_weight: InnerWeight, is_prefill: bool
    ) -> Tensor:
        """The output of the attention's last linear."""
        self._post_cache_kv(q, cache_kv, infer_state, layer_weight)
        self._observe("qkv", (q, cache_kv), infer_state)
        if is_prefill:
            att = self._context_attention_kernel(q, cache_kv, infer_state, layer_weight)
        else:
            att = self._token_attention_kernel(q, infer_state, layer_weight)
        self._observe("att", att, infer_state)
        return self._get_o(att, infer_state, layer_weight)

    def _added(self, point: str, out: Tensor, post_norm: NormWeight | None, infer_state: State) -> Tensor:
        """What a half of the layer adds to the hidden states, from its last linear's output."""
        if post_norm is not None:
            out = post_norm.norm(out)
        if self.spec.residual_scale != 1.0:
            out = out * self.spec.residual_scale
        self._observe(point, out, infer_state)
        return out

    def _norm_and_qkv(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> tuple[Tensor, Tensor]:
        if "_fused_norm_qkv" in self._fused_hooks and infer_state.may_fuse_norms and layer_weight.att_norm is not None:
            return self._fused_norm_qkv(input, infer_state, layer_weight)
        x = self._att_norm(input, infer_state, layer_weight)
        self._observe("att_norm", x, infer_state)
        return self._get_qkv(x, infer_state, layer_weight)

    def _norm_and_mix(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        x = self._att_norm(input, infer_state, layer_weight)
        self._observe("att_norm", x, infer_state)
        return self._mix(x, infer_state, layer_weight)

    def _norm_and_ffn(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        if "_fused_norm_ffn" in self._fused_hooks and infer_state.may_fuse_norms and layer_weight.ffn_norm is not None:
            return self._fused_norm_ffn(input, infer_state, layer_weight)
        x = self._ffn_norm(input, infer_state, layer_weight)
        self._observe("ffn_norm", x, infer_state)
        return self._ffn(x, infer_state, layer_weight)

    @replaces("_att_norm", "_get_qkv")
    def _fused_norm_qkv(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> tuple[Tensor, Tensor]:
        """``_att_norm``, then ``_get_qkv``, in one op; ``infer_state.residual`` becomes the new residual."""
        raise NotImplementedError

    @replaces("_ffn_norm", "_ffn")
    def _fused_norm_ffn(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        """``_ffn_norm``, then ``_ffn``, with the norm and the first linear in one op; as above."""
        raise NotImplementedError

    def _att_norm(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        return add_norm(input, infer_state, layer_weight.att_norm)

    def _get_qkv(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> tuple[Tensor, Tensor]:
        """This rank's queries ``[tokens, heads, dim]``, and its keys and values ``[tokens, 2 * kv_heads, dim]``.

        Norms of heads and positions are applied later, in ``_post_cache_kv``.
        """
        raise NotImplementedError

    def _post_cache_kv(self, q: Tensor, cache_kv: Tensor, infer_state: State, layer_weight: InnerWeight) -> None:
        """Apply norms and positions to queries and keys in place, if the model has them; store keys and values."""
        ops.write_kv(cache_kv, infer_state.step.mem_index, self._kv_cache(infer_state, layer_weight))

    def _kv_cache(self, infer_state: State, layer_weight: InnerWeight) -> ops.KvCache:
        """The cache of this layer, with its scales if it is quantised."""
        memory = infer_state.mem_manager
        cache, token_scales = memory.layer(self.layer_num), memory.scales(self.layer_num)
        scales = layer_weight.kv_scales if token_scales is None else token_scales
        return cache if scales is None else ops.QuantizedKv(cache, scales)

    def _context_attention_kernel(
        self, q: Tensor, cache_kv: Tensor, infer_state: State, layer_weight: InnerWeight
    ) -> Tensor:
        # without a cache, the slot of a token is its row in the step
        cache = self._kv_cache(infer_state, layer_weight) if self.spec.is_causal else cache_kv
        return ops.context_attention(q, cache_kv, cache, infer_state.attn, layer_weight.attn_options)

    def _token_attention_kernel(self, q: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        cache = self._kv_cache(infer_state, layer_weight)
        return ops.token_attention(q, cache, infer_state.attn, layer_weight.attn_options)

    def _get_o(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        if self.spec.gate_dim:
            assert infer_state.output_gate is not None
            gates = ops.gate(infer_state.output_gate)
            input = input * gates.view(*input.shape[:-1], self.spec.gate_dim)
        rows = input.flatten(-2)
        if layer_weight.o_norm is not None:
            rows = layer_weight.o_norm.norm(rows)
        return layer_weight.o_proj.mm(rows)

    def _mix(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        """What the recurrent mixer computes. It continues and replaces the states of the step's requests."""
        assert infer_state.step.states is not None
        states = infer_state.mem_manager.states(self.layer_num)
        return layer_weight.mixer.forward(input, states, infer_state.step.states)

    def _ffn_norm(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        return add_norm(input, infer_state, layer_weight.ffn_norm)

    def _ffn(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        raise NotImplementedError

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a fused projection (q, then k, then v) in the form that _get_qkv returns."""
        heads = [self.num_heads, 2 * self.num_kv_heads]
        q, cache_kv = qkv.view(len(qkv), -1, self.spec.head_dim).split_with_sizes(heads, dim=1)
        return q, cache_kv

    def _observe(self, point: str, value: Any, infer_state: State) -> None:
        if infer_state.observer is not None:
            infer_state.observer.observe(f"layers.{self.layer_num}.{point}", value)


def add_norm(input: Tensor, infer_state: InferStateInfo, norm: NormWeight | None) -> Tensor:
    """Add a layer's output to the residual and normalise the sum; the first norm of a step starts the residual."""
    if infer_state.residual is None:
        infer_state.residual = input
        return input if norm is None else norm.norm(input)
    if norm is None:
        return infer_state.residual.add_(input)
    return norm.add_norm(input, infer_state.residual)
