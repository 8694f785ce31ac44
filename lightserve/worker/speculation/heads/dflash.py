"""DFlash: a few layers that draft a whole block of tokens in one pass, from hidden states of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

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
    ModelInput,
    NormWeight,
    ReplicatedWeight,
    RmsNormWeight,
    TpPartBaseModel,
    Weight,
    WeightContext,
)
from lightserve.common.basemodel.kv_scales import KvScales
from lightserve.common.basemodel.layer_weights.weight import WeightGroup
from lightserve.common.kv.layout import kv_storage
from lightserve.model_files.dflash import DFlashConfig
from lightserve.models.registry import get_model_class
from lightserve.worker.speculation.heads.head import ParallelHead
from lightserve.worker.speculation.heads.vocabulary import HeadVocab, VocabHead, VocabHeadWeight

# of training, d2t the other way round, or computed here
NOT_READ = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


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

    def __init__(self, model: TpPartBaseModel, config: DFlashConfig, names: set[str]) -> None:
        """``names``: the tensors of the drafter's checkpoint."""
        super().__init__(model)
        self.config, self._names = config, names
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
        if args.kv_dtype == "fp8":
            for spec, layer in zip(self.specs, weights.layers, strict=True):
                layer.kv_scales = KvScales([spec], is_fp8=True).of_layer(spec, self.model.tp).to(device)
        return weights

    def kv_groups(self) -> tuple[KvGroup, ...]:
        spec, args = self.specs[0], self.model.args
        heads, storage = spec.kv_heads_of_rank(self.model.tp.size), kv_storage(args.kv_dtype, args.dtype)
        layers = tuple(spec.layer_num for spec in self.specs)
        return (KvGroup(layers, heads, spec.head_dim, spec.head_dim, *storage),)

    def checkpoint(self, tensors: Iterable[CheckpointTensor]) -> Iterable[CheckpointTensor]:
        return (
            tensor._replace(name=tensor.name.removeprefix("model."))
            for tensor in tensors
            if not tensor.name.endswith(NOT_READ)
        )

    def model_states(self, hidden: HiddenStates, final: Tensor) -> Tensor:
        return torch.cat(hidden.aux, dim=-1)

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
    model_class = get_model_class(config.layers.model_type)
    model = model_class.__new__(model_class)
    model.config = config.layers
    return tuple(
        replace(
            model.layer_spec(number),
            layer_num=first + number,
            names=LayerNames(layers=f"layers.{number}", has_numbers=False),
            window=None,
        )
        for number in range(config.layers.num_layers)
    )
