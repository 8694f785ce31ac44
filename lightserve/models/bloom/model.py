"""BLOOM: ALiBi instead of rotary positions, LayerNorm, a biased GELU feed-forward, a norm on the embedding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.errors import CheckpointError, ModelFilesError


def alibi_slopes(num_heads: int) -> Tensor:
    """A geometric sequence; heads past a power of two take the odd terms of the next one (Press et al., 2022)."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    whole = 2 ** math.floor(math.log2(num_heads))
    return torch.tensor(geometric(whole) + geometric(2 * whole)[::2][: num_heads - whole])


class BloomPreAndPostLayerWeight(bm.PreAndPostLayerWeight):
    def __init__(self, config: bm.ModelConfig, context: bm.WeightContext) -> None:
        norm = (config.hidden_size, config.norm_eps, context)
        self.embedding = bm.VocabWeight("word_embeddings", config.vocab_size, config.hidden_size, context)
        self.embedding_norm = bm.LayerNormWeight("word_embeddings_layernorm", *norm)
        self.final_norm = bm.LayerNormWeight("ln_f", *norm)
        self.lm_head = self.embedding


class BloomTransformerLayerWeight(bm.TransformerLayerWeight):
    def __init__(self, layer_num: int, config: bm.ModelConfig, context: bm.WeightContext) -> None:
        at, hidden, ffn = f"h.{layer_num}", config.hidden_size, config.intermediate_size
        qkv = [bm.Block(f"{at}.self_attention.{name}_proj", config.num_heads, config.head_dim) for name in "qkv"]
        self.att_norm = bm.LayerNormWeight(f"{at}.input_layernorm", hidden, config.norm_eps, context)
        self.qkv_proj = bm.ColumnWeight(qkv, hidden, context, bias=True)
        self.o_proj = bm.RowWeight(f"{at}.self_attention.dense", hidden, hidden, context, bias=True)
        self.ffn_norm = bm.LayerNormWeight(f"{at}.post_attention_layernorm", hidden, config.norm_eps, context)
        self.up_proj = bm.ColumnWeight([bm.Block(f"{at}.mlp.dense_h_to_4h", ffn)], hidden, context, bias=True)
        self.down_proj = bm.RowWeight(f"{at}.mlp.dense_4h_to_h", ffn, hidden, context, bias=True)


class BloomPreLayerInfer(bm.PreLayerInferTpl[BloomPreAndPostLayerWeight, bm.InferStateInfo]):
    def _embed(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: BloomPreAndPostLayerWeight) -> Tensor:
        return layer_weight.embedding_norm.norm(super()._embed(input, infer_state, layer_weight))


class BloomTransformerLayerInfer(bm.TransformerLayerInferTpl[BloomTransformerLayerWeight, bm.InferStateInfo]):
    def _get_qkv(
        self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: BloomTransformerLayerWeight
    ) -> tuple[Tensor, Tensor]:
        return self._split_heads(layer_weight.qkv_proj.mm(input))

    def _ffn(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: BloomTransformerLayerWeight) -> Tensor:
        return layer_weight.down_proj.mm(ops.gelu_tanh(layer_weight.up_proj.mm(input)))


class BloomTpPartModel(bm.TpPartBaseModel):
    pre_and_post_weight_class = BloomPreAndPostLayerWeight
    transformer_weight_class = BloomTransformerLayerWeight
    pre_layer_infer_class = BloomPreLayerInfer
    transformer_layer_infer_class = BloomTransformerLayerInfer

    def _verify_params(self) -> None:
        if self.config.hf.get("apply_residual_connection_post_layernorm"):
            raise ModelFilesError("config.json: apply_residual_connection_post_layernorm is not supported")

    def _init_some_value(self) -> None:
        self.alibi_slopes = alibi_slopes(self.config.num_heads).chunk(self.tp.size)[self.tp.rank].to(self.device)

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        """Checkpoints interleave q, k and v head by head: ``[heads, 3, dim, ...]``."""
        for name, tensor, file in super().adapt_checkpoint(checkpoint):
            name = name.removeprefix("transformer.")
            if ".query_key_value." not in name:
                yield bm.CheckpointTensor(name, tensor, file)
                continue
            if len(tensor) != 3 * self.config.hidden_size:
                raise CheckpointError(f"{file}: {name} has {len(tensor)} rows, wanted {3 * self.config.hidden_size}")
            per_head = tensor.reshape(self.config.num_heads, 3, self.config.head_dim, *tensor.shape[1:])
            for i, letter in enumerate("qkv"):
                part = per_head[:, i].flatten(0, 1)
                yield bm.CheckpointTensor(name.replace("query_key_value", f"{letter}_proj"), part, file)
