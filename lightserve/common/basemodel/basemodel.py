from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightserve.common.basemodel.infer_struct import InferStateInfo, ModelInput, Observer
from lightserve.common.basemodel.layer_infer.base_layer_infer import (
    PostLayerInfer,
    PreLayerInfer,
    TransformerLayerInfer,
)
from lightserve.common.basemodel.layer_infer.template.decoder_layer_infer_template import DecoderLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.post_layer_infer_template import PostLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.pre_layer_infer_template import PreLayerInferTpl
from lightserve.common.basemodel.layer_weights.layer_weight import TransformerLayerWeight
from lightserve.common.basemodel.loadable_model import LoadableModel, ModelArgs
from lightserve.common.basemodel.lora import uses_adapters
from lightserve.common.basemodel.mixers.mixer import state_groups
from lightserve.common.basemodel.pipeline import HiddenStateLink, ReceivePreLayerInfer, layers_of_stage, states_after
from lightserve.common.basemodel.rotary import query_scale_tables, rotary_tables
from lightserve.common.basemodel.routed_experts import ExpertsShape, RoutedExperts, routed_experts_shape
from lightserve.common.kv.layout import KvGroup, KvLayout, kv_storage
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.kv.req_manager import ReqManager

API_VERSION = 1  # of the classes below a model; it grows when a model of another package would have to change


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """All tokens of a step after the last layer, before the final norm."""

    output: Tensor  # [tokens, hidden]: what the last layer adds to infer_state.residual
    infer_state: InferStateInfo
    aux: tuple[Tensor, ...] = ()  # [tokens, hidden] after each of ``TpPartBaseModel.aux_layers``, residual included


class TpPartBaseModel(LoadableModel):
    """One rank's part of a model: its weights (``LoadableModel``), its layers and its KV cache.

    A model says in ``layer_spec`` and ``model_spec`` how it differs from Llama. Each ``_init_*`` and ``_verify_*`` step
    may be overridden too; they run in the order of ``__init__``.
    """

    api_version: ClassVar[int | None] = None  # the ``API_VERSION`` that a model of another package was written for

    pre_layer_infer_class: ClassVar[type[PreLayerInfer[Any, Any]]] = PreLayerInferTpl
    transformer_layer_infer_class: ClassVar[type[TransformerLayerInfer[Any, Any]]] = DecoderLayerInferTpl
    post_layer_infer_class: ClassVar[type[PostLayerInfer[Any, Any]]] = PostLayerInferTpl
    infer_state_class: ClassVar[type[InferStateInfo]] = InferStateInfo

    # attention reads a prefix that requests share once for all of them (AttnBatch.shared_prefixes)
    attends_to_shared_prefixes: ClassVar[bool] = True

    # a step is a fixed sequence of kernels, which a graph can replay
    captures_graphs: ClassVar[bool] = True

    observer: Observer | None = None  # receives intermediate values: see hooks.py

    aux_layers: tuple[int, ...] = ()  # see ``keep_states_after``

    def __init__(self, args: ModelArgs) -> None:
        self._init_args(args)
        self._init_weights()
        self._init_mem_manager()
        self._init_infer_layer()
        self._init_some_value()
        self._init_custom()

    def _init_mem_manager(self) -> None:
        self.model_kv_layout = self._kv_layout()  # of all pipeline stages
        self.kv_layout = self.model_kv_layout.of_layers(spec.layer_num for spec in self.own_layer_specs)
        self.set_kv_size(self.args.max_total_token_num)
        self.req_manager = ReqManager(self.args.max_reqs, self.args.max_req_total_len, self.device)

    def set_kv_size(self, size: int, group_sizes: tuple[int, ...] = (), state_rows: int = 0) -> None:
        """Allocate an empty KV cache of ``size`` tokens, and rows for the states of recurrent layers.

        KV groups may have pools of their own.
        """
        take = self.args.take_kv_memory
        self.mem_manager = MemoryManager(size, self.kv_layout, self.device, group_sizes, state_rows, take)
        shape = self.routed_experts_shape
        own_layers = layers_of_stage(self.config.num_layers, self.pp)
        self.routed_experts = None if shape is None else RoutedExperts(size + 1, shape, self.device, own_layers)
        if self.routed_experts is not None:
            self.mem_manager.token_buffers.append(self.routed_experts.table)
        if group_sizes:
            self.req_manager.set_num_groups(len(group_sizes))

    @property
    def routed_experts_shape(self) -> ExpertsShape | None:
        """None: they are not kept."""
        return routed_experts_shape(self.layer_specs) if self.args.keeps_routed_experts else None

    def add_kv_group(self, group: KvGroup) -> None:
        """Let a draft head keep KV in the slots of the model's tokens. The KV cache is empty afterwards."""
        self.model_kv_layout = replace(self.model_kv_layout, groups=(*self.model_kv_layout.groups, group))
        self.kv_layout = replace(self.kv_layout, groups=(*self.kv_layout.groups, group))
        self.set_kv_size(self.mem_manager.size)

    def _kv_layout(self) -> KvLayout:
        """What layers store: keys and values of each token, in groups of layers with the same heads, and states."""
        layers: dict[tuple[int, int, int | None], list[int]] = {}
        for spec in self.layer_specs:
            if not spec.has_attention or not spec.is_causal or spec.kv_source is not None:
                continue
            key = spec.kv_heads_of_rank(self.tp.size), spec.head_dim, spec.window
            layers.setdefault(key, []).append(spec.layer_num)
        dtype, scale_dtype = kv_storage(self.args.kv_dtype, self.args.dtype)
        groups = (
            KvGroup(tuple(numbers), heads, dim, dim, dtype, scale_dtype, window)
            for (heads, dim, window), numbers in layers.items()
        )
        sources = ((spec.layer_num, spec.kv_source) for spec in self.layer_specs)
        readers = tuple((layer, source) for layer, source in sources if source is not None)
        states = state_groups(self.layer_specs, self.tp.size, self.args.dtype, self.args.state_dtype)
        return KvLayout(tuple(groups), states, readers)

    def _init_infer_layer(self) -> None:
        self.pre_infer = self.pre_layer_infer_class(self.spec, self.tp)
        self.hidden_state_link = HiddenStateLink(self.pp, self.args.dtype, self.device)
        if not self.pp.is_first:
            before = states_after(self.layer_specs[: self.own_layer_specs[0].layer_num])
            self.pre_infer = ReceivePreLayerInfer(self.spec, self.tp, self.hidden_state_link, before)
        self.layers_infer = [self.transformer_layer_infer_class(spec, self.tp) for spec in self.own_layer_specs]
        self.post_infer = self.post_layer_infer_class(self.spec, self.tp)

    def _init_some_value(self) -> None:
        """Create the tables that every step reads."""
        tables = rotary_tables(self.own_layer_specs, self.req_manager.max_len)
        self.rotary_tables = {key: (cos.to(self.device), sin.to(self.device)) for key, (cos, sin) in tables.items()}
        axes = self.config.rope.axes
        self.rotary_axes = torch.tensor(axes, device=self.device) if axes else None
        scales = query_scale_tables(self.own_layer_specs, self.req_manager.max_len)
        self.query_scale_tables = {key: table.to(self.device, self.args.dtype) for key, table in scales.items()}

    def _init_custom(self) -> None:
        """Create whatever else a model needs."""

    @contextmanager
    def distinct_layers_only(self) -> Iterator[None]:
        """Run steps on layers of distinct kernel keys only. They launch every kernel that a full step launches."""
        whole = self.layers_infer, self.layer_weights
        layers = zip(*whole, strict=True)
        distinct = {self._kernel_key(infer, weight): (infer, weight) for infer, weight in layers}
        self.layers_infer = [infer for infer, _ in distinct.values()]
        self.layer_weights = [weight for _, weight in distinct.values()]
        try:
            yield
        finally:
            self.layers_infer, self.layer_weights = whole

    def _kernel_key(self, infer: TransformerLayerInfer[Any, Any], weight: TransformerLayerWeight) -> Hashable:
        kv_group = self.kv_layout.group_of(infer.layer_num)
        plan_key = None if kv_group is None else kv_group.plan_key
        return type(infer), weight.kernel_key(), weight.attn_options.key, plan_key, infer.spec.rotary_dim

    @torch.inference_mode()
    def forward(self, step: ModelInput) -> Tensor:
        """The logits of ``step.logit_rows``, ``[rows, vocab]`` in the model's dtype."""
        return self.logits(self.hidden_states(step))

    @torch.inference_mode()
    def hidden_states(self, step: ModelInput) -> HiddenStates:
        """Run all layers of this pipeline stage. ``logits`` or ``send_to_next_stage`` does the rest."""
        infer_state = self.infer_state_class(step, self.mem_manager)
        infer_state.observer = self.observer
        infer_state.groups = self.args.parallel.dp
        infer_state.routed_experts = self.routed_experts
        infer_state.init_some_extra_state(self, step.input_ids)
        forward = self._context_forward if step.is_prefill else self._token_forward
        with uses_adapters(self.lora, step.lora):
            output = forward(step.input_ids, infer_state)
        return HiddenStates(output, infer_state, tuple(infer_state.aux.get(count, output) for count in self.aux_layers))

    def keep_states_after(self, counts: tuple[int, ...]) -> None:
        """Keep the hidden states after so many layers, which a draft head reads; 0: the embeddings.

        All stages of a pipeline must be told the same: they pass those of their layers on.
        """
        self.aux_layers = counts
        if isinstance(self.pre_infer, ReceivePreLayerInfer):
            self.pre_infer.aux_layers = self._aux_until(self.own_layer_specs[0].layer_num)

    def _aux_until(self, count: int) -> tuple[int, ...]:
        return tuple(sorted({layers for layers in self.aux_layers if layers <= count}))

    def send_to_next_stage(self, hidden: HiddenStates) -> None:
        """Let the next pipeline stage continue with these hidden states. It does not wait until they are there."""
        state, experts = hidden.infer_state, self.routed_experts
        counts = self._aux_until(self.own_layer_specs[-1].layer_num + 1)
        residual = [] if state.residual is None else [state.residual]
        aux = [state.aux.get(count, hidden.output) for count in counts]
        states = torch.stack([hidden.output, *residual, *aux])
        self.hidden_state_link.send(states, *(experts.for_next_stage(state.cache_slots) if experts else ()))

    @torch.inference_mode()
    def final_states(self, hidden: HiddenStates, rows: Tensor | None = None) -> Tensor:
        """The hidden states after the final norm, of ``rows`` or of all tokens: ``[rows, hidden]``.

        ``hidden`` is not valid after a call without ``rows``.
        """
        return self.post_infer.final_states(hidden.output, hidden.infer_state, self.pre_post_weight, rows)

    @torch.inference_mode()
    def logits_of(self, states: Tensor) -> Tensor:
        """The logits of this rank's tokens, from rows of ``final_states``: see ``local_logits``."""
        return self.post_infer.logits_of(states, self.pre_post_weight)

    @torch.inference_mode()
    def logits(self, hidden: HiddenStates, rows: Tensor | None = None) -> Tensor:
        """The logits of ``rows`` ``[n]`` int64, or of the rows that the step asks for.

        Callers with little memory ask for a few rows at a time, and for the step's own rows at the end: ``hidden`` is
        not valid afterwards.
        """
        return self.gather_logits(self.local_logits(hidden, rows))

    def gather_logits(self, local: Tensor) -> Tensor:
        """The logits of the whole vocabulary, from ``local_logits`` of all ranks."""
        return self.pre_post_weight.lm_head.gather_logits(local)

    @torch.inference_mode()
    def local_logits(self, hidden: HiddenStates, rows: Tensor | None = None) -> Tensor:
        """The logits of this rank's tokens; as for ``logits``. Those past ``lm_head.count`` mean nothing."""
        infer_state = hidden.infer_state
        if rows is not None:
            return self.post_infer.logits(hidden.output, infer_state, self.pre_post_weight, rows)
        is_prefill = infer_state.step.is_prefill
        forward = self.post_infer.context_forward if is_prefill else self.post_infer.token_forward
        logits = forward(hidden.output, infer_state, self.pre_post_weight)
        if self.observer is not None:
            self.observer.observe("logits", self.gather_logits(logits))
        return logits

    def _context_forward(self, input_ids: Tensor, infer_state: InferStateInfo) -> Tensor:
        x = self.pre_infer.context_forward(input_ids, infer_state, self.pre_post_weight)
        images = infer_state.step.images
        self._observe_embedding(x, infer_state)
        for layer, weight in zip(self.layers_infer, self.layer_weights, strict=True):
            infer_state.use_pool_of(layer.layer_num)
            x = layer.context_forward(x, infer_state, weight)
            if images is not None:
                x = images.add(x, layer.layer_num)
            self._observe_layer(layer.layer_num, x, infer_state)
        return x

    def _token_forward(self, input_ids: Tensor, infer_state: InferStateInfo) -> Tensor:
        x = self.pre_infer.token_forward(input_ids, infer_state, self.pre_post_weight)
        images = infer_state.step.images
        self._observe_embedding(x, infer_state)
        for layer, weight in zip(self.layers_infer, self.layer_weights, strict=True):
            infer_state.use_pool_of(layer.layer_num)
            x = layer.token_forward(x, infer_state, weight)
            if images is not None:
                x = images.add(x, layer.layer_num)
            self._observe_layer(layer.layer_num, x, infer_state)
        return x

    def _observe_embedding(self, x: Tensor, infer_state: InferStateInfo) -> None:
        if 0 in self.aux_layers and self.pp.is_first:
            infer_state.aux[0] = x.clone()  # the first norm may make it the residual
        if self.observer is not None:
            self.observer.observe("embedding", x)

    def _observe_layer(self, layer_num: int, output: Tensor, infer_state: InferStateInfo) -> None:
        """Report and keep the sum that the next norm computes."""
        if layer_num + 1 in self.aux_layers:
            residual = infer_state.residual
            infer_state.aux[layer_num + 1] = output.clone() if residual is None else residual + output
        if self.observer is not None and infer_state.residual is not None:
            self.observer.observe(f"layers.{layer_num}", infer_state.residual + output)
