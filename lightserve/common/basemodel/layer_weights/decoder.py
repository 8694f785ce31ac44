"""The weights of decoders and encoders, as their specs declare them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel.layer_weights.experts import MoeFfnWeight
from lightserve.common.basemodel.layer_weights.ffn import FfnWeight, dense_ffn_weight
from lightserve.common.basemodel.layer_weights.key_scaling import KeyLayout, scale_keys
from lightserve.common.basemodel.layer_weights.layer_weight import PreAndPostLayerWeight, TransformerLayerWeight
from lightserve.common.basemodel.layer_weights.linears import Block, ColumnWeight, RowWeight, VocabWeight
from lightserve.common.basemodel.layer_weights.norms import NormWeight, SplitNormWeight, norm_weight
from lightserve.common.basemodel.layer_weights.pooling_head import PoolingHeadWeight
from lightserve.common.basemodel.layer_weights.qk_norms import qk_norm_weight
from lightserve.common.basemodel.layer_weights.row_map import (
    RowMap,
    in_blocks,
    in_head_parts,
    in_kv_groups,
    pairs_to_halves,
    whole,
)
from lightserve.common.basemodel.layer_weights.weight import HeadValues, Weight, WeightContext
from lightserve.common.basemodel.spec import LayerSpec, ModelSpec, QkvLayout
from lightserve.common.checkpoint.piece import Piece


class DecoderPreAndPostWeight(PreAndPostLayerWeight):
    """Embedding, final norm and head. A model that computes no logits lacks ``lm_head``.

    The first stage of a pipeline has what is before the layers, the last one what is behind them.
    """

    def __init__(self, spec: ModelSpec, context: WeightContext) -> None:
        pp = context.parallel.pp
        if pp.is_first:
            self._init_pre(spec, context)
        if pp.is_last:
            self._init_post(spec, context)

    def _init_pre(self, spec: ModelSpec, context: WeightContext) -> None:
        config, names = spec.config, spec.names
        norm = (config.hidden_size, spec.norm_eps, context)
        self.embedding = VocabWeight(names.embedding, config.vocab_size, config.hidden_size, context)
        self.positions = PositionWeight(names.positions, spec, context) if names.positions else None
        self.token_types = TokenTypeWeight(names.token_types, spec, context) if names.token_types else None
        self.embedding_norm = norm_weight(spec.norm, names.embedding_norm, *norm) if names.embedding_norm else None

    def _init_post(self, spec: ModelSpec, context: WeightContext) -> None:
        config, names = spec.config, spec.names
        vocab = (config.vocab_size, config.hidden_size, context)
        norm = (config.hidden_size, spec.norm_eps, context)
        self.final_norm = norm_weight(spec.norm, names.final_norm, *norm) if names.final_norm else None
        if spec.is_tied and not hasattr(self, "embedding"):
            self.embedding = VocabWeight(names.embedding, *vocab)
        if spec.has_lm_head:
            self.lm_head = self.embedding if spec.is_tied else VocabWeight(names.lm_head, *vocab, bias=spec.head_bias)
        self.pooling_head = PoolingHeadWeight(spec.pooling.head if spec.pooling else (), context)


class DecoderLayerWeight(TransformerLayerWeight):
    """A layer lacks the attributes of what it does not have: attention, mixer or feed-forward."""

    def __init__(self, spec: LayerSpec, context: WeightContext) -> None:
        self.attn_options = ops.AttnOptions(spec.scale)
        self._keys_to_scale: KeyLayout | None = None
        if spec.has_attention or spec.mixer is not None:
            self.att_norm = _norm(spec.names.att_norm, spec, context)
            self.att_post_norm = _norm(spec.names.att_post_norm, spec, context)
        if spec.has_attention:
            self._init_attention(spec, context)
            self.o_norm = _o_norm(spec, context)
        if spec.mixer is not None:
            self.mixer = spec.mixer.weight(spec, context)
        if spec.has_ffn:
            self.ffn_norm = _norm(spec.names.ffn_norm, spec, context)
            self.ffn = _ffn(spec, context)
            self.ffn_post_norm = _norm(spec.names.ffn_post_norm, spec, context)

    def _init_attention(self, spec: LayerSpec, context: WeightContext) -> None:
        at, names, hidden, is_transposed = spec.prefix, spec.names, spec.hidden_size, spec.is_transposed
        width = spec.num_heads * spec.head_dim
        self._keys_to_scale = _keys_to_scale(spec, context)
        self.qkv_proj = ColumnWeight(
            _qkv(spec),
            spec.qkv_input_size or hidden,
            context,
            bias=spec.qkv_bias,
            is_transposed=is_transposed,
            scales_rows=self._keys_to_scale is not None,
        )
        self.q_norm = qk_norm_weight(f"{at}.{names.q_norm}", spec.num_heads, spec, context)
        has_keys = spec.kv_source is None
        self.k_norm = qk_norm_weight(f"{at}.{names.k_norm}", spec.num_kv_heads, spec, context) if has_keys else None
        self.sinks = HeadValues(f"{at}.{names.sinks}", spec.num_heads, context) if spec.has_sinks else None
        self.o_proj = RowWeight(
            f"{at}.{names.o}", width, hidden, context, bias=spec.o_bias, is_transposed=is_transposed
        )
        self.attn_options = ops.AttnOptions(
            spec.scale,
            alibi_slopes=_alibi_slopes(spec, context),
            causal=spec.is_causal,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.sinks.tensor if self.sinks else None,
        )

    def process_weights_after_loading(self) -> None:
        if self._keys_to_scale is not None:
            self.largest_key_factor = scale_keys(self.qkv_proj.method, self._keys_to_scale, self.qkv_proj.lora)
        super().process_weights_after_loading()

    @cached_property
    def head_norms(self) -> ops.HeadNorms | None:
        """The norms of query and key heads, if one op can compute them together with the rotation."""
        q_norm = None if self.q_norm is None else self.q_norm.as_rms_norm()
        k_norm = None if self.k_norm is None else self.k_norm.as_rms_norm()
        if q_norm is None or k_norm is None or q_norm.eps != k_norm.eps:
            return None
        return ops.HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)


class PositionWeight(Weight):
    """A learned vector for every position. Every rank has all of them."""

    def __init__(self, prefix: str, spec: ModelSpec, context: WeightContext) -> None:
        self._prefix, self._offset = prefix, spec.position_offset
        self.tensor = context.empty(spec.num_positions + spec.position_offset, spec.config.hidden_size)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(f"{self._prefix}.weight", tuple(self.tensor.shape), self.tensor)

    def embed(self, positions: Tensor) -> Tensor:
        return self.tensor.index_select(0, positions + self._offset if self._offset else positions)


class TokenTypeWeight(Weight):
    """A learned vector for each text of a pair. Every rank has all of them."""

    def __init__(self, prefix: str, spec: ModelSpec, context: WeightContext) -> None:
        self._prefix = prefix
        self.tensor = context.empty(spec.num_token_types, spec.config.hidden_size)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(f"{self._prefix}.weight", tuple(self.tensor.shape), self.tensor)

    def embed(self, types: Tensor) -> Tensor:
        return self.tensor.index_select(0, types)


def _norm(name: str | None, spec: LayerSpec, context: WeightContext) -> NormWeight | None:
    if name is None:
        return None
    return norm_weight(spec.norm, f"{spec.prefix}.{name}", spec.hidden_size, spec.norm_eps, context)


def _o_norm(spec: LayerSpec, context: WeightContext) -> SplitNormWeight | None:
    name, width = spec.names.o_norm, spec.num_heads * spec.head_dim
    return SplitNormWeight(f"{spec.prefix}.{name}", width, spec.norm_eps, context) if name else None


def _ffn(spec: LayerSpec, context: WeightContext) -> FfnWeight:
    if spec.moe is not None and not spec.moe.is_beside_ffn:
        return MoeFfnWeight(spec, spec.moe, context)
    return dense_ffn_weight(spec, context)


def _qkv(spec: LayerSpec) -> list[Block]:
    names = spec.names
    prefixes = [names.q, names.k, names.v] if names.qkv is None else [names.qkv] * 3
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    maps = _qkv_rows(spec)
    if spec.has_output_gate and names.output_gate is None:
        maps[0], gates = in_head_parts(spec.num_heads, spec.head_dim, spec.head_dim)
        prefixes, heads, maps = [*prefixes, names.q], [*heads, spec.num_heads], [*maps, gates]
    if spec.has_rope_pairs:
        maps[:2] = [pairs_to_halves(maps[i], heads[i], spec.rotary_dim) for i in range(2)]
    blocks = zip(prefixes, heads, maps, strict=True)
    linears = [Block(f"{spec.prefix}.{name}", count, spec.head_dim, rows) for name, count, rows in blocks]
    if names.output_gate is not None:
        linears.append(Block(f"{spec.prefix}.{names.output_gate}", spec.num_heads, spec.head_dim))
    if names.head_gate is not None:
        linears.append(Block(f"{spec.prefix}.{names.head_gate}", spec.num_heads))
    return linears[:1] if spec.kv_source is not None else linears if spec.has_v_proj else linears[:2]


def _qkv_rows(spec: LayerSpec) -> list[RowMap]:
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    if spec.names.qkv is None:
        return [whole(count, dim) for count in (heads, kv_heads, kv_heads)]
    if spec.qkv_layout is QkvLayout.BLOCKS:
        return in_blocks(heads * dim, kv_heads * dim, kv_heads * dim)
    return in_kv_groups(heads, kv_heads, dim)


def _keys_to_scale(spec: LayerSpec, context: WeightContext) -> KeyLayout | None:
    """None if keys have no bias, or are changed after it."""
    is_changed = spec.qk_norm is not None or spec.clip_qkv is not None
    if not context.quantizes_kv or not spec.qkv_bias or is_changed:
        return None
    heads, kv_heads = (context.tp.part_of(count) for count in (spec.num_heads, spec.num_kv_heads))
    return KeyLayout(heads.stop - heads.start, kv_heads.stop - kv_heads.start, spec.head_dim, spec.rotary_dim)


def _alibi_slopes(spec: LayerSpec, context: WeightContext) -> Tensor | None:
    if spec.alibi_slopes is None:
        return None
    slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=context.device)
    return slopes[context.tp.part_of(len(slopes))]
