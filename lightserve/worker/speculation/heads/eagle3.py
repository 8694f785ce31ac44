"""EAGLE-3: one layer that reads the hidden states after three layers of the model, with a small vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import (
    Block,
    CheckpointTensor,
    DecoderLayerInferTpl,
    DecoderLayerWeight,
    HiddenStates,
    InferStateInfo,
    KvGroup,
    LayerNames,
    LayerSpec,
    NormWeight,
    Piece,
    ReplicatedWeight,
    RmsNormWeight,
    TpPartBaseModel,
    VocabWeight,
    Weight,
    WeightContext,
)
from lightserve.common.basemodel.kv_scales import KvScales
from lightserve.common.kv.layout import kv_storage
from lightserve.model_files.draft_head import Eagle3Config
from lightserve.models.registry import get_model_class
from lightserve.worker.speculation.heads.head import HeadWeight, LayerHead, SampledAt, SampleLocal

NOT_READ = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # of training, or d2t the other way round


class TokenMapWeight(Weight):
    """Which tokens of the model the tokens of the head are: token i is i + offset[i]."""

    def __init__(self, name: str, size: int, context: WeightContext) -> None:
        self._name = name
        self.offsets = torch.empty(size, dtype=torch.int64, device=context.device)

    def pieces(self) -> Iterator[Piece]:
        integers = (torch.int64, torch.int32)
        yield Piece(self._name, (len(self.offsets),), self.offsets, dtypes=integers)

    def token_ids(self) -> Tensor:
        return torch.arange(len(self.offsets), device=self.offsets.device) + self.offsets


class Eagle3Weight(HeadWeight):
    def __init__(self, spec: LayerSpec, config: Eagle3Config, names: set[str], context: WeightContext) -> None:
        layer, hidden = config.layer, spec.hidden_size
        norm = (spec.norm_eps, context)
        width = len(config.aux_layers) * config.target_hidden_size
        self.fc = ReplicatedWeight([Block("fc", hidden)], width, context)
        self.fc_input_norm = RmsNormWeight("input_norm", width, *norm) if config.norm_before_fc else None
        self.embedding_norm: NormWeight = RmsNormWeight(f"{spec.prefix}.input_layernorm", hidden, *norm)
        self.hidden_norm: NormWeight = RmsNormWeight(f"{spec.prefix}.hidden_norm", hidden, *norm)
        self.layer = DecoderLayerWeight(spec, context)
        self.norm = RmsNormWeight("norm", hidden, *norm)
        is_mapped = config.draft_vocab_size != layer.vocab_size
        self.token_map = TokenMapWeight("d2t", config.draft_vocab_size, context) if is_mapped else None
        if is_mapped or "lm_head.weight" in names:
            self.lm_head = VocabWeight("lm_head", config.draft_vocab_size, hidden, context)
        if hidden != config.target_hidden_size or "embed_tokens.weight" in names:
            self.embedding = VocabWeight("embed_tokens", layer.vocab_size, hidden, context)


class Eagle3LayerInfer(DecoderLayerInferTpl[DecoderLayerWeight]):
    def _att_norm(self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderLayerWeight) -> Tensor:
        """The input is normed already, each half by its own norm."""
        return input


class Eagle3Head(LayerHead):
    weights: Eagle3Weight

    def __init__(self, model: TpPartBaseModel, config: Eagle3Config, names: set[str]) -> None:
        """``names``: the tensors of the head's checkpoint."""
        super().__init__(model)
        self.config, self._names = config, names
        self.aux_layers = config.aux_layers
        self.spec = _layer_spec(config, model.config.num_layers)
        self.spec.check_tp(model.tp.size)
        self.layer = Eagle3LayerInfer(self.spec, model.tp)

    def new_weights(self, device: torch.device) -> Eagle3Weight:
        args = self.model.args
        weights = Eagle3Weight(self.spec, self.config, self._names, WeightContext(args.parallel, args.dtype, device))
        if args.kv_dtype == "fp8":
            scales = KvScales([self.spec], is_fp8=True).of_layer(self.spec, self.model.tp)
            weights.layer.kv_scales = scales.to(device)
        return weights

    def finish_dummy(self) -> None:
        if self.weights.token_map is not None:
            self.weights.token_map.offsets.zero_()

    def kv_groups(self) -> tuple[KvGroup, ...]:
        spec, args = self.spec, self.model.args
        dtype, scale_dtype = kv_storage(args.kv_dtype, args.dtype)
        heads = spec.kv_heads_of_rank(self.model.tp.size)
        return (KvGroup((spec.layer_num,), heads, spec.head_dim, spec.head_dim, dtype, scale_dtype),)

    def checkpoint(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        return (_renamed(tensor) for tensor in tensors if not tensor.name.endswith(NOT_READ))

    def model_states(self, hidden: HiddenStates, final: Tensor) -> Tensor:
        return torch.cat(hidden.aux, dim=-1)

    def hidden(self, states: Tensor) -> Tensor:
        norm = self.weights.fc_input_norm
        return self.weights.fc.mm(states if norm is None else norm.norm(states))

    def layer_input(self, hidden: Tensor, token_ids: Tensor, state: InferStateInfo) -> Tensor:
        weights = self.weights
        table = getattr(weights, "embedding", None) or self.model.pre_post_weight.embedding
        normed = weights.hidden_norm.norm(hidden)
        state.residual = normed if self.config.norm_before_residual else hidden
        return torch.cat((weights.embedding_norm.norm(table.embed(token_ids)), normed), dim=-1)

    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        return normed if self.config.norm_output else output

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


def _layer_spec(config: Eagle3Config, layer_num: int) -> LayerSpec:
    """A layer of Llama or Qwen3 whose attention reads two hidden states."""
    model_class = get_model_class(config.layer.model_type)
    model = model_class.__new__(model_class)
    model.config = config.layer
    spec = model.layer_spec(0)
    names = LayerNames(layers="midlayer" if config.is_original else "layers.0", has_numbers=False, att_norm=None)
    return replace(spec, layer_num=layer_num, names=names, window=None, qkv_input_size=2 * spec.hidden_size)


def _renamed(tensor: CheckpointTensor) -> CheckpointTensor:
    return tensor._replace(name=tensor.name.removeprefix("model."))
