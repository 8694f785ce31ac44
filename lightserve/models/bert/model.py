"""BERT: an encoder with learned positions, token types, and LayerNorms behind each half of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

from lightserve.common import basemodel as bm

LAYER_NAMES = bm.LayerNames(
    layers="encoder.layer",
    att_norm=None,
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    o="attention.output.dense",
    att_post_norm="attention.output.LayerNorm",
    ffn_norm=None,
    up="intermediate.dense",
    down="output.dense",
    ffn_post_norm="output.LayerNorm",
)
MODEL_NAMES = bm.ModelNames(
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    final_norm=None,
    optional_prefix="bert.",
)
# of the training: the masked language model, and a pooler that only some heads read
TRAINING = ("cls.", "lm_head.", "pooler.", "embeddings.position_ids")


class EncoderTpPartModel(bm.TpPartBaseModel):
    """What encoders share: no logits, and tensors of the training in the checkpoint."""

    training_tensors: ClassVar[tuple[str, ...]] = TRAINING

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        pooling = self.args.pooling
        layers = () if pooling is None else pooling.head
        used = tuple(f"{name}." for layer in layers for name in (layer.name, layer.norm) if name is not None)
        for tensor in super().adapt_checkpoint(checkpoint):
            if tensor.name.startswith(used) or not tensor.name.startswith(self.training_tensors):
                yield tensor

    def _verify_params(self) -> None:
        self.config.check_value("is_decoder", False)
        self.config.check_value("add_cross_attention", False)
        self.config.check_value("position_embedding_type", "absolute")


class BertTpPartModel(EncoderTpPartModel):
    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            norm=bm.Norm.LAYER,
            is_post_norm=True,
            rope=None,
            qkv_bias=True,
            o_bias=True,
            is_gated=False,
            ffn_bias=True,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(
            super().model_spec(),
            names=MODEL_NAMES,
            norm=bm.Norm.LAYER,
            num_positions=self.config.max_position,
            num_token_types=self.config.count("type_vocab_size", 2),
        )
