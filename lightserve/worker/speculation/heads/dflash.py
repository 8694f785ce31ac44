"""DFlash: a few layers that draft a whole block of tokens in one pass, from hidden states of the model."""

from __future__ import annotations

from collections.abc import Iterable
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
    ModelInput,
    NormWeight,
    ReplicatedWeight,
    RmsNormWeight,
    TpPartBaseModel,
    Weight,
    WeightContext,
)
from lightserve.common.basemodel.layer_weights.weight import WeightGroup
from lightserve.model_files.dflash import DFlashConfig
from lightserve.worker.speculation.heads.head import ParallelHead
from lightserve.worker.speculation.heads.vocabulary import HeadVocab, VocabHead, VocabHeadWeight, layer_spec_of


class DFlashWeight(VocabHeadWeight):
    def __init__(
        self, specs: tuple[LayerSpec, ...], config: DFlashConfig, names: set[str], context: WeightContext
    ) -> None:
        hidden, vocab_size = config.layers.hidden_size, config.layers.vocab_size
        norm = (hidden, specs[0].norm_eps, context)
        self.fc = ReplicatedWeight([Block("fc", hidden)], len(config.aux_layers) * config.target_hidden_size, context)
        self.hidden_norm: NormWeight = RmsNormWeight("hidden_norm", *norm)
        self.layers = [DecoderLayerWeight(spec, context) for spec in specs]
        self.norm = RmsNormWeight("norm", *norm)
        self._init_vocab(
            HeadVocab(hidden, config.target_hidden_size, vocab_size, config.draft_vocab_size), names, context
        )

    def _members(self) -> Iterable[Weight | WeightGroup]:
        return [*super()._members(), *self.layers]


class DFlashLayerInfer(DecoderLayerInferTpl[DecoderLayerWeight]):
    def store(self, hidden: Tensor, infer_state: InferStateInfo, layer_weight: DecoderLayerWeight) -> None:
        """Keys and values of the step's tokens. Their queries are not used."""
        q, cache_kv = self._get_qkv(hidden, infer_state, layer_weight)
        self._post_cache_kv(q, cache_kv, infer_state, layer_weight)


class DFlashHead(VocabHead, ParallelHead):
    weights: DFlashWeight
    not_read = (*VocabHead.not_read, "rotary_emb.inv_freq")  # which is computed here

    def __init__(self, model: TpPartBaseModel, config: DFlashConfig, names: set[str]) -> None:
        """``names``: the tensors of the drafter's checkpoint."""
        super().__init__(model)
        self.config = config
        self._init_names(names)
        self.aux_layers = config.aux_layers
        self.mask_token_id = config.mask_token_id
        self._specs = _layer_specs(config, model.config.num_layers)
        for spec in self._specs:
            spec.check_tp(model.tp.size)
        self._layers = [DFlashLayerInfer(spec, model.tp) for spec in self._specs]

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self._specs

    def new_weights(self, device: torch.device) -> DFlashWeight:
        args = self.model.args
        weights = DFlashWeight(self.specs, self.config, self._names, WeightContext(args.parallel, args.dtype, device))
        self._init_kv_scales(weights.layers, device)
        return weights

    def hidden(self, states: Tensor) -> Tensor:
        return self.weights.hidden_norm.norm(self.weights.fc.mm(states))

    def write_context(self, hidden: Tensor, step: ModelInput) -> None:
        state = self._state(step)
        for layer, weights in zip(self._layers, self.weights.layers, strict=True):
            layer.store(hidden, state, weights)

    def block(self, step: ModelInput) -> Tensor:
        state, x = self._state(step), self.embed(step.input_ids)
        for layer, weights in zip(self._layers, self.weights.layers, strict=True):
            x = layer.context_forward(x, state, weights)
        assert state.residual is not None
        return state.residual + x


def _layer_specs(config: DFlashConfig, first: int) -> tuple[LayerSpec, ...]:
    """Their numbers follow those of the model's layers."""
    return tuple(
        replace(
            layer_spec_of(config.layers, number),
            layer_num=first + number,
            names=LayerNames(layers=f"layers.{number}", has_numbers=False),
            window=None,
        )
        for number in range(config.layers.num_layers)
    )
