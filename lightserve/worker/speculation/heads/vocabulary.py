"""Draft heads with files of their own. They read the hidden states after some layers of the model.

Their vocabulary is their own or the model's, or a part of that which the head maps to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import (
    CheckpointTensor,
    HiddenStates,
    KvGroup,
    LayerSpec,
    Piece,
    TransformerLayerWeight,
    VocabWeight,
    Weight,
    WeightContext,
)
from lightserve.common.basemodel.kv_scales import KvScales
from lightserve.common.checkpoint.reader import open_checkpoint
from lightserve.common.kv.layout import kv_storage
from lightserve.errors import CheckpointError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.source import ModelSource
from lightserve.models.registry import get_model_class
from lightserve.worker.speculation.heads.head import (
    HeadWeight,
    LayerHead,
    SampledAt,
    SampleLocal,
    lacks_embedding,
)

EMBEDDING, TOKEN_MAP = "embed_tokens.weight", "d2t"


class HeadVocab(NamedTuple):
    hidden_size: int  # of the head
    target_hidden_size: int  # of the model
    size: int  # tokens of the model
    drafted_size: int  # tokens that the head can draft


class TokenMapWeight(Weight):
    """Which tokens of the model the tokens of the head are: token i is i + offset[i]."""

    def __init__(self, name: str, size: int, context: WeightContext) -> None:
        self._name = name
        self.offsets = torch.empty(size, dtype=torch.int64, device=context.device)

    def pieces(self) -> Iterator[Piece]:
        integers = (torch.int64, torch.int32)
        yield Piece(self._name, (len(self.offsets),), self.offsets, dtypes=integers)

    def token_ids(self) -> Tensor:
        return token_ids_of(self.offsets)


def token_ids_of(offsets: Tensor) -> Tensor:
    return torch.arange(len(offsets), device=offsets.device) + offsets


def plain_name(name: str) -> str:
    return name.removeprefix("model.")


class VocabHeadWeight(HeadWeight):
    """What the checkpoint lacks is that of the model."""

    def _init_vocab(self, vocab: HeadVocab, names: set[str], context: WeightContext) -> None:
        """``names``: the tensors of the head's checkpoint."""
        is_mapped = vocab.drafted_size != vocab.size
        self.token_map = TokenMapWeight(TOKEN_MAP, vocab.drafted_size, context) if is_mapped else None
        is_other_size = vocab.hidden_size != vocab.target_hidden_size
        if is_mapped or is_other_size or "lm_head.weight" in names:
            self.lm_head = VocabWeight("lm_head", vocab.drafted_size, vocab.hidden_size, context)
        if is_other_size or EMBEDDING in names:
            self.embedding = VocabWeight("embed_tokens", vocab.size, vocab.hidden_size, context)


class VocabHead(LayerHead):
    config: Any  # a dataclass
    weights: VocabHeadWeight
    # ends of names: of training, or d2t the other way round
    not_read: ClassVar[tuple[str, ...]] = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")

    embedding_name = EMBEDDING

    def _init_names(self, names: set[str]) -> None:
        """``names``: the tensors of the head's checkpoint."""
        self.needs_embedding = EMBEDDING not in names and lacks_embedding(self.model)
        self._names = names | {EMBEDDING} if self.needs_embedding else names

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """One, since all layers are alike."""
        spec, args = self.specs[0], self.model.args
        heads, storage = spec.kv_heads_of_rank(self.model.tp.size), kv_storage(args.kv_dtype, args.dtype)
        layers = tuple(spec.layer_num for spec in self.specs)
        return (KvGroup(layers, heads, spec.head_dim, spec.head_dim, *storage),)

    def checkpoint(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        return (tensor._replace(name=plain_name(tensor.name)) for tensor in tensors if self.reads(tensor.name))

    def reads(self, name: str) -> bool:
        return not name.endswith(self.not_read)

    @property
    def own_tables(self) -> set[str]:
        """The embedding and the head for logits, if they are not those of the model."""
        tables = self._names & {EMBEDDING, "lm_head.weight"}
        return tables - {EMBEDDING} if self.needs_embedding else tables

    def check_values(self) -> None:
        if self.weights.token_map is not None:
            self._check_map(self.weights.token_map.offsets)

    def check_map_of(self, source: ModelSource) -> None:
        """As ``check_values`` would after a load of these files."""
        for tensor in open_checkpoint(source):
            if self.weights.token_map is not None and plain_name(tensor.name) == TOKEN_MAP:
                self._check_map(tensor.tensor)

    def _check_map(self, offsets: Tensor) -> None:
        ids = token_ids_of(offsets)
        vocab_size = self.model.config.vocab_size
        if not bool(((ids >= 0) & (ids < vocab_size)).all()):
            raise CheckpointError(
                f"{TOKEN_MAP} of the draft head maps to the tokens {int(ids.min())} to {int(ids.max())}, and the model "
                f"has {vocab_size}; use the head that was trained for this model"
            )

    def model_states(self, hidden: HiddenStates, final: Tensor) -> Tensor:
        return torch.cat(hidden.aux, dim=-1)

    def _init_kv_scales(self, layers: Iterable[TransformerLayerWeight], device: torch.device) -> None:
        """``layers``: their weights."""
        if self.model.args.kv_dtype == "fp8":
            for spec, layer in zip(self.specs, layers, strict=True):
                layer.kv_scales = KvScales([spec], is_fp8=True).of_layer(spec, self.model.tp).to(device)

    def finish_dummy(self) -> None:
        if self.weights.token_map is not None:
            self.weights.token_map.offsets.zero_()

    def embed(self, token_ids: Tensor) -> Tensor:
        table: VocabWeight = getattr(self.weights, "embedding", None) or self.model.pre_post_weight.embedding
        return table.embed(token_ids)

    def sample(self, normed: Tensor, at: SampledAt, sample_local: SampleLocal) -> Tensor:
        """The noise belongs to the model's tokens, so the logits take their places."""
        logits = self.logits(normed)
        return ops.sample(logits, at.temperatures, at.seeds, at.positions)

    def logits(self, normed: Tensor) -> Tensor:
        """Of the model's vocabulary, ``[rows, vocab]``; -inf for tokens that the head does not draft."""
        head: VocabWeight = getattr(self.weights, "lm_head", None) or self.model.pre_post_weight.lm_head
        logits = head.gather_logits(head.local_logits(normed))
        if self.weights.token_map is None:
            return logits
        all_logits = logits.new_full((len(logits), self.model.config.vocab_size), float("-inf"))
        return all_logits.index_copy_(1, self.weights.token_map.token_ids(), logits)


def layer_spec_of(config: ModelConfig, number: int) -> LayerSpec:
    """Of a layer as a model with this config has it. The model is not built."""
    model_class = get_model_class(config.model_type)
    model = model_class.__new__(model_class)
    model.config = config
    return model.layer_spec(number)
