"""EAGLE-3: one layer that reads the hidden states after three layers of the model, with a small vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.common.basemodel import (
    Block,
    DecoderLayerInferTpl,
    DecoderLayerWeight,
    InferStateInfo,
    LayerNames,
    LayerSpec,
    NormWeight,
    ReplicatedWeight,
    RmsNormWeight,
    TpPartBaseModel,
    WeightContext,
)
from lightserve.model_files.draft_head import Eagle3Config
from lightserve.worker.speculation.heads.head import OneLayerHead, OneLayerWeight, with_images
from lightserve.worker.speculation.heads.vocabulary import HeadVocab, VocabHead, VocabHeadWeight, layer_spec_of


class Eagle3Weight(OneLayerWeight, VocabHeadWeight):
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
        vocab = HeadVocab(hidden, config.target_hidden_size, layer.vocab_size, config.draft_vocab_size)
        self._init_vocab(vocab, names, context)


class Eagle3LayerInfer(DecoderLayerInferTpl[DecoderLayerWeight]):
    def _att_norm(self, input: Tensor, infer_state: InferStateInfo, layer_weight: DecoderLayerWeight) -> Tensor:
        """The input is normed already, each half by its own norm."""
        return input


class Eagle3Head(OneLayerHead, VocabHead):
    weights: Eagle3Weight

    def __init__(self, model: TpPartBaseModel, config: Eagle3Config, names: set[str]) -> None:
        """``names``: the tensors of the head's checkpoint."""
        super().__init__(model)
        self.config = config
        self._init_names(names)
        self.aux_layers = config.aux_layers
        self.spec = _layer_spec(config, model.config.num_layers)
        self.spec.check_tp(model.tp.size)
        self.layer = Eagle3LayerInfer(self.spec, model.tp)

    def new_weights(self, device: torch.device) -> Eagle3Weight:
        args = self.model.args
        weights = Eagle3Weight(self.spec, self.config, self._names, WeightContext(args.parallel, args.dtype, device))
        self._init_kv_scales([weights.layer], device)
        return weights

    def hidden(self, states: Tensor) -> Tensor:
        norm = self.weights.fc_input_norm
        return self.weights.fc.mm(states if norm is None else norm.norm(states))

    def layer_input(self, hidden: Tensor, token_ids: Tensor, state: InferStateInfo) -> Tensor:
        weights = self.weights
        normed = weights.hidden_norm.norm(hidden)
        state.residual = normed if self.config.norm_before_residual else hidden
        embedded = with_images(self.embed(token_ids), state.step)
        return torch.cat((weights.embedding_norm.norm(embedded), normed), dim=-1)

    def recycled(self, output: Tensor, normed: Tensor) -> Tensor:
        return normed if self.config.norm_output else output


def _layer_spec(config: Eagle3Config, layer_num: int) -> LayerSpec:
    """A layer of Llama or Qwen3 whose attention reads two hidden states."""
    spec = layer_spec_of(config.layer, 0)
    names = LayerNames(layers="midlayer" if config.is_original else "layers.0", has_numbers=False, att_norm=None)
    return replace(spec, layer_num=layer_num, names=names, window=None, qkv_input_size=2 * spec.hidden_size)
