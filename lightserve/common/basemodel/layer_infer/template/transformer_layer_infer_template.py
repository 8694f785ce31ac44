"""A transformer layer as a sequence of hooks. A model overrides those in which it differs."""

from __future__ import annotations

from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.infer_struct import InferStateInfo
from lightserve.common.basemodel.layer_infer.base_layer_infer import InnerWeight, State, TransformerLayerInfer
from lightserve.common.basemodel.layer_weights.weights import NormWeight
from lightserve.common.tp import TpGroup
from lightserve.model_files.model_config import ModelConfig


class TransformerLayerInferTpl(TransformerLayerInfer[InnerWeight, State]):
    """Norm, attention, norm, feed-forward; each half's output is added to the residual by the norm that follows it."""

    def __init__(self, layer_num: int, config: ModelConfig, tp: TpGroup) -> None:
        super().__init__(layer_num, config, tp)
        self.num_heads = config.num_heads // tp.size  # this rank's
        self.num_kv_heads = config.kv_heads_of_rank(tp.size)
        self.scale = config.head_dim**-0.5

    def context_forward(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        q, cache_kv = self._cached_qkv(input, infer_state, layer_weight)
        att = self._context_attention_kernel(q, cache_kv, infer_state, layer_weight)
        return self._after_attention(att, infer_state, layer_weight)

    def token_forward(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        q, _ = self._cached_qkv(input, infer_state, layer_weight)
        att = self._token_attention_kernel(q, infer_state, layer_weight)
        return self._after_attention(att, infer_state, layer_weight)

    def _cached_qkv(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> tuple[Tensor, Tensor]:
        """Queries, keys and values as the attention reads them; the keys and values are in the cache too."""
        q, cache_kv = self._norm_and_qkv(input, infer_state, layer_weight)
        self._post_cache_kv(q, cache_kv, infer_state, layer_weight)
        return q, cache_kv

    def _after_attention(self, att: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        x = self._get_o(att, infer_state, layer_weight)
        return self._norm_and_ffn(x, infer_state, layer_weight)

    def _norm_and_qkv(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> tuple[Tensor, Tensor]:
        """``_att_norm``, then ``_get_qkv``. A model may do both at once where they are its own (``_has_hooks_of``)."""
        x = self._att_norm(input, infer_state, layer_weight)
        return self._get_qkv(x, infer_state, layer_weight)

    def _norm_and_ffn(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        """``_ffn_norm``, then ``_ffn``; both at once as above."""
        x = self._ffn_norm(input, infer_state, layer_weight)
        return self._ffn(x, infer_state, layer_weight)

    def _att_norm(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        return add_norm(input, infer_state, layer_weight.att_norm)

    def _get_qkv(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> tuple[Tensor, Tensor]:
        """This rank's queries ``[tokens, heads, dim]``, and its keys and values ``[tokens, 2 * kv_heads, dim]``.

        They do not know their positions yet.
        """
        raise NotImplementedError

    def _post_cache_kv(self, q: Tensor, cache_kv: Tensor, infer_state: State, layer_weight: InnerWeight) -> None:
        """Put positions into queries and keys, in place, where a model does so, and store keys and values."""
        ops.write_kv(cache_kv, infer_state.step.mem_index, infer_state.mem_manager.layer(self.layer_num))

    def _context_attention_kernel(
        self, q: Tensor, cache_kv: Tensor, infer_state: State, layer_weight: InnerWeight
    ) -> Tensor:
        cache = infer_state.mem_manager.layer(self.layer_num)
        return ops.context_attention(q, cache_kv, cache, infer_state.attn, self._attn_options(infer_state))

    def _attn_options(self, infer_state: State) -> ops.AttnOptions:
        return ops.AttnOptions(self.scale, alibi_slopes=infer_state.alibi_slopes)

    def _token_attention_kernel(self, q: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        cache = infer_state.mem_manager.layer(self.layer_num)
        return ops.token_attention(q, cache, infer_state.attn, self._attn_options(infer_state))

    def _get_o(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        return layer_weight.o_proj.mm(input.flatten(-2))

    def _ffn_norm(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        return add_norm(input, infer_state, layer_weight.ffn_norm)

    def _ffn(self, input: Tensor, infer_state: State, layer_weight: InnerWeight) -> Tensor:
        raise NotImplementedError

    def _has_hooks_of(self, model: type, *names: str) -> bool:
        """Whether these hooks are those of the class ``model``: neither overridden below it nor listened to."""
        return all(getattr(getattr(self, name), "__func__", None) is getattr(model, name) for name in names)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The output of a fused projection, q then k then v, as _get_qkv returns it."""
        heads = [self.num_heads, 2 * self.num_kv_heads]
        q, cache_kv = qkv.view(len(qkv), -1, self.config.head_dim).split_with_sizes(heads, dim=1)
        return q, cache_kv


def add_norm(input: Tensor, infer_state: InferStateInfo, norm: NormWeight) -> Tensor:
    """Add a layer's output to the residual and normalise the sum; the first one starts the residual."""
    if infer_state.residual is None:
        infer_state.residual = input
        return norm.norm(input)
    return norm.add_norm(input, infer_state.residual)
