from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightserve.common.basemodel.infer_struct import InferStateInfo, ModelInput, Observer
from lightserve.common.basemodel.kv_scales import KvScales
from lightserve.common.basemodel.layer_infer.base_layer_infer import (
    PostLayerInfer,
    PreLayerInfer,
    TransformerLayerInfer,
)
from lightserve.common.basemodel.layer_infer.template.decoder_layer_infer_template import DecoderLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.post_layer_infer_template import PostLayerInferTpl
from lightserve.common.basemodel.layer_infer.template.pre_layer_infer_template import PreLayerInferTpl
from lightserve.common.basemodel.layer_weights.decoder import DecoderLayerWeight, DecoderPreAndPostWeight
from lightserve.common.basemodel.layer_weights.key_scaling import warn_of_large_keys
from lightserve.common.basemodel.layer_weights.layer_weight import PreAndPostLayerWeight, TransformerLayerWeight
from lightserve.common.basemodel.layer_weights.loader import check_weights, fill_dummy, load_weights
from lightserve.common.basemodel.layer_weights.weight import WeightContext
from lightserve.common.basemodel.lora import LoraArgs, LoraPool, uses_adapters
from lightserve.common.basemodel.merge_lora import check_merge, merged
from lightserve.common.basemodel.pipeline import HiddenStateLink, ReceivePreLayerInfer, layers_of_stage, states_after
from lightserve.common.basemodel.pooling import with_outer_prefix
from lightserve.common.basemodel.rotary import query_scale_tables, rotary_tables
from lightserve.common.basemodel.spec import LayerSpec, ModelSpec, activation_of
from lightserve.common.checkpoint.piece import total_size
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.kv.layout import KvGroup, KvLayout, kv_storage
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.kv.req_manager import ReqManager
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.common.quantization import experts_method_factory, linear_method_factory
from lightserve.errors import ModelFilesError, ServerError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.text_part import is_of_other_part, text_name
from lightserve.model_files.lora.adapter import Adapter, LinearSize, check_base
from lightserve.model_files.pooling import PoolingConfig

# tensors of checkpoints that the model computes itself
REDUNDANT = (
    ".rotary_emb.inv_freq",
    ".rotary_pos_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """What a rank needs to build its part of a model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    parallel: Parallel
    checkpoint: Iterable[CheckpointTensor] | None  # None: random weights
    max_total_token_num: int
    max_reqs: int
    max_req_total_len: int
    tensor_metadata: Iterable[CheckpointTensor] = ()  # names, shapes and dtypes, to check them before loading
    kv_dtype: str | None = None  # fp8 or int8; None: keys and values are stored in dtype
    pooling: PoolingConfig | None = None  # what the model computes instead of text
    lora: LoraArgs | None = None  # None: the model takes no adapters
    packed_input_bits: int | None = None  # of products with packed weights on a CPU; None: as the model needs
    merged_adapter: Adapter | None = None  # added to the weights while they are loaded


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """All tokens of a step after the last layer, before the final norm."""

    output: Tensor  # [tokens, hidden]: what the last layer adds to infer_state.residual
    infer_state: InferStateInfo


class TpPartBaseModel:
    """One rank's part of a model: its weights, its layers and its KV cache.

    A model says in ``layer_spec`` and ``model_spec`` how it differs from Llama. Each ``_init_*`` and ``_verify_*`` step
    may be overridden too; they run in the order of ``__init__``.
    """

    pre_and_post_weight_class: ClassVar[type[PreAndPostLayerWeight]] = DecoderPreAndPostWeight
    transformer_weight_class: ClassVar[type[TransformerLayerWeight]] = DecoderLayerWeight
    pre_layer_infer_class: ClassVar[type[PreLayerInfer[Any, Any]]] = PreLayerInferTpl
    transformer_layer_infer_class: ClassVar[type[TransformerLayerInfer[Any, Any]]] = DecoderLayerInferTpl
    post_layer_infer_class: ClassVar[type[PostLayerInfer[Any, Any]]] = PostLayerInferTpl
    infer_state_class: ClassVar[type[InferStateInfo]] = InferStateInfo

    # attention reads a prefix that requests share once for all of them (AttnBatch.shared_prefixes)
    attends_to_shared_prefixes: ClassVar[bool] = True

    # attention can read the keys and values of the step itself, for texts whose tokens see all others
    attends_without_cache: ClassVar[bool] = True

    # what args.kv_dtype may be; a model whose attention reads other caches has fewer
    kv_dtypes: ClassVar[tuple[str, ...]] = ("fp8", "int8")

    observer: Observer | None = None  # receives intermediate values: see hooks.py

    def __init__(self, args: ModelArgs) -> None:
        self._init_args(args)
        self._init_weights()
        self._init_mem_manager()
        self._init_infer_layer()
        self._init_some_value()
        self._init_custom()

    def _init_args(self, args: ModelArgs) -> None:
        """Everything that needs no memory."""
        self.args = args
        self.tp = args.parallel.tp
        self.pp = args.parallel.pp
        self.device = args.device
        self._init_config()
        self._init_specs()
        self._verify_must()
        self._verify_params()

    @classmethod
    def unused_tensors(cls, args: ModelArgs) -> list[str]:
        """Check ``args.tensor_metadata`` as loading does, and return the tensors that the model does not use."""
        model = cls.__new__(cls)
        model._init_args(args)
        return model._check_metadata()

    @classmethod
    def adapter_sizes(cls, args: ModelArgs) -> dict[str, LinearSize]:
        """The linears of a model that take adapters. Nothing is loaded."""
        model = cls.__new__(cls)
        model._init_args(args)
        pool = LoraPool(LoraArgs(0, 0), args.dtype, torch.device("meta"))
        model._new_weights(pool.device, pool)
        return pool.sizes()

    def _init_config(self) -> None:
        self.config = self.args.config

    def _init_specs(self) -> None:
        self.spec = self.model_spec()
        self.layer_specs = [self.layer_spec(i) for i in range(self.config.num_layers)]
        pooling = self.args.pooling
        if pooling is not None:
            self.spec = replace(self.spec, pooling=pooling, has_lm_head=pooling.answers is not None)
            self.layer_specs = [replace(spec, is_causal=pooling.is_causal) for spec in self.layer_specs]
        own = layers_of_stage(self.config.num_layers, self.pp)
        self.own_layer_specs = self.layer_specs[own.start : own.stop]  # those of this pipeline stage

    def layer_spec(self, layer_num: int) -> LayerSpec:
        """How a layer is built. A model that is not a Llama replaces the values in which it differs."""
        config = self.config
        return LayerSpec(
            config=config,
            layer_num=layer_num,
            **config.layer_shapes[layer_num]._asdict(),
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            norm_eps=config.norm_eps,
            rope=config.rope,
            scale=config.head_dim**-0.5,
            activation=activation_of(config, "hidden_act"),
        )

    def model_spec(self) -> ModelSpec:
        """What is before the first and after the last layer."""
        return ModelSpec(config=self.config, norm_eps=self.config.norm_eps, is_tied=self.config.tie_word_embeddings)

    def _verify_must(self) -> None:
        """Check what every model needs."""
        if self.args.kv_dtype is not None and self.args.kv_dtype not in self.kv_dtypes:
            raise ServerError(
                f"kv_dtype {self.args.kv_dtype} is not supported for {self.config.model_type}, "
                f"only {', '.join(('none', *self.kv_dtypes))}"
            )
        for spec in self.layer_specs:
            spec.check_tp(self.tp.size)
            spec.check_halves()
        if not self.has_kv and not self.attends_without_cache:
            raise ModelFilesError(
                f"config.json: is_causal false is not supported for {self.config.model_type}; set it to true"
            )
        if self.config.has_windows and all(spec.window is None for spec in self.layer_specs):
            raise ModelFilesError(
                f"config.json: sliding_window {self.config.window} is not supported for {self.config.model_type}; "
                "set it to null to attend to all tokens"
            )
        self._verify_spec()

    def _verify_spec(self) -> None:
        """Check the values outside the layers."""
        spec, max_len = self.spec, self.args.max_req_total_len
        if spec.names.positions is not None and max_len > spec.num_positions:
            raise ModelFilesError(
                f"max_req_total_len={max_len}, but {self.config.model_type} has {spec.num_positions} learned "
                "positions; lower it"
            )
        if spec.is_tied and spec.head_bias:
            raise ModelFilesError(
                f"config.json: tie_word_embeddings is not supported for {self.config.model_type}, whose head has a bias"
            )

    def _verify_params(self) -> None:
        """Refuse a config.json with options that the model's code does not implement."""

    def _init_weights(self) -> None:
        self.check_adapters()
        self._check_metadata()
        lora = self.args.lora
        self.lora = None if lora is None else LoraPool(lora, self.args.dtype, self.device)
        self.pre_post_weight, self.layer_weights = self._new_weights(self.device, self.lora)
        if self.args.kv_dtype == "fp8":
            scales = self._kv_scales()
            for spec, weight in zip(self.own_layer_specs, self.layer_weights, strict=True):
                weight.kv_scales = scales.of_layer(spec, self.tp).to(self.device)
        if self.args.checkpoint is None:
            fill_dummy([self.pre_post_weight, *self.layer_weights])
        else:
            self.load_weights(self.args.checkpoint)
        if self.lora is not None:
            self.lora.allocate()

    def load_weights(self, checkpoint: Iterable[CheckpointTensor]) -> None:
        """Write a checkpoint into the weights, for the first time or again.

        Every tensor stays where the first load put it, so captured graphs compute with the new weights. The KV cache is
        that of the weights before, and so are the factors of adapters that were loaded before (``key_scaling.py``).
        Raises CheckpointError for a checkpoint that does not fit. Then some weights are those of the new checkpoint and
        others are not: no step may run until another load succeeds.
        """
        layers, scales = [self.pre_post_weight, *self.layer_weights], self._kv_scales()
        tensors = scales.removed_from(self.merged_checkpoint(checkpoint))
        load_weights(layers, tensors, self.config.num_layers, self._names_of_all_stages())
        if self.args.kv_dtype != "fp8":
            return
        warn_of_large_keys(self.layer_weights)
        for spec, weight in zip(self.own_layer_specs, self.layer_weights, strict=True):
            assert weight.kv_scales is not None
            weight.kv_scales.copy_(scales.of_layer(spec, self.tp))

    def merged_checkpoint(self, checkpoint: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """``adapt_checkpoint``, with the adapter that is merged into the weights."""
        adapted, adapter = self._adapted(checkpoint), self.args.merged_adapter
        if adapter is None:
            return adapted
        return merged(adapted, self.own_names(adapter), any(spec.is_transposed for spec in self.layer_specs))

    def check_adapters(self) -> None:
        """Check adapters against linears on the meta device, before anything is loaded."""
        lora, merged_adapter = self.args.lora, self.args.merged_adapter
        if not (lora and lora.checked) and merged_adapter is None:
            return
        pool = LoraPool(LoraArgs(0, 0), self.args.dtype, torch.device("meta"))
        layers = self._new_weights(pool.device, pool, of_all_stages=True)
        if merged_adapter is not None:
            check_merge(self.own_names(merged_adapter), pool.sizes(), self.spec)
        for adapter in lora.checked if lora else ():
            check_base(self.own_names(adapter), pool.sizes(), _modules(*layers))

    def own_names(self, adapter: Adapter) -> Adapter:
        """The adapter with the names that the weights declare."""
        return replace(adapter, modules={self.own_name(name): module for name, module in adapter.modules.items()})

    def own_name(self, name: str) -> str:
        """The name of a tensor or a module as the weights declare it."""
        name = name if self.config.multimodal_type is None else text_name(name)
        return name.removeprefix(self.spec.names.optional_prefix)

    def check_adapter(self, adapter: Adapter) -> Adapter:
        """Raise if the adapter does not fit this model; otherwise return it with the names that the weights declare."""
        adapter = self.own_names(adapter)
        check_base(adapter, self.lora_sizes, _modules(self.pre_post_weight, self.layer_weights))
        return adapter

    @cached_property
    def lora_sizes(self) -> dict[str, LinearSize]:
        """The linears that take adapters."""
        return {} if self.lora is None else self.lora.sizes()

    def _kv_scales(self) -> KvScales:
        return KvScales(self.layer_specs, is_fp8=self.args.kv_dtype == "fp8")

    def _new_weights(
        self, device: torch.device, lora: LoraPool | None = None, of_all_stages: bool = False
    ) -> tuple[PreAndPostLayerWeight, list[TransformerLayerWeight]]:
        linears = linear_method_factory(self.config, self.args.packed_input_bits)
        experts, quantizes_kv = experts_method_factory(self.config), self.args.kv_dtype is not None
        parallel, specs = self.args.parallel, self.own_layer_specs
        if of_all_stages:
            parallel, specs = replace(parallel, pp=RankGroup()), self.layer_specs
        context = WeightContext(parallel, self.args.dtype, device, linears, experts, quantizes_kv, lora)
        layers = [self.transformer_weight_class(spec, context) for spec in specs]
        pre_post = self.pre_and_post_weight_class(self.spec, context)
        if self.config.quantization is not None and parallel.pp.size == 1:  # a stage lacks modules of others
            pieces = (piece for layer in (pre_post, *layers) for piece in layer.pieces())
            self.config.quantization.check_modules(dict.fromkeys(piece.name.rpartition(".")[0] for piece in pieces))
        return pre_post, layers

    def _names_of_all_stages(self) -> set[str]:
        """The tensors of the checkpoint that some pipeline stage uses. Empty: there is one stage."""
        if self.pp.size == 1:
            return set()
        pre_post, layers = self._new_weights(torch.device("meta"), of_all_stages=True)
        return {piece.name for layer in (pre_post, *layers) for piece in layer.pieces()}

    def _check_metadata(self) -> list[str]:
        """Check the checkpoint against weights on the meta device: a wrong config.json may need too much memory.

        Returns the tensors that the model does not use.
        """
        tensor_metadata = list(self.args.tensor_metadata)
        if not tensor_metadata:
            return []
        pre_post, layers = self._new_weights(torch.device("meta"), of_all_stages=True)
        checkpoint = self._kv_scales().removed_from(self._adapted(tensor_metadata))
        return check_weights([pre_post, *layers], checkpoint, self.config.num_layers)

    @property
    def active_share(self) -> float:
        """The part of the layers' weights that a token uses: less than 1 with experts."""
        specs = self.layer_specs
        return sum(spec.active_weights for spec in specs) / max(sum(spec.num_weights for spec in specs), 1)

    @property
    def bytes_per_weight(self) -> float:
        """Of the layers' linears and experts as this rank stores them, with their scales."""
        size = total_size(layer.stored_size() for layer in self.layer_weights)
        return size.num_bytes / max(size.num_weights, 1)

    def _adapted(self, checkpoint: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """A checkpoint of a model without a head for text may lack the prefix ``model.`` of its names."""
        if self.config.multimodal_type is not None:
            checkpoint = (
                tensor._replace(name=text_name(tensor.name))
                for tensor in checkpoint
                if not is_of_other_part(tensor.name)
            )
        if self.args.pooling is None:
            return self.adapt_checkpoint(checkpoint)
        prefixed = with_outer_prefix(checkpoint, self.spec.names, self.layer_specs[0].names)
        unused = () if self.spec.has_lm_head else (f"{self.spec.names.lm_head}.",)
        return (tensor for tensor in self.adapt_checkpoint(prefixed) if not tensor.name.startswith(unused))

    @property
    def fp8_share(self) -> float:
        """The part of the layers' weights whose products are computed in fp8."""
        size = total_size(layer.stored_size() for layer in self.layer_weights)
        return size.num_in_fp8 / max(size.num_weights, 1)

    def adapt_checkpoint(self, checkpoint: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """Rename and reshape the checkpoint's tensors to what the weights declare, and drop redundant ones."""
        for name, tensor, file in checkpoint:
            name = name.removeprefix(self.spec.names.optional_prefix)
            if self.config.quantization is not None:
                name = self.config.quantization.tensor_name(name)
            is_head = name == f"{self.spec.names.lm_head}.weight"
            if is_head and self.spec.normalizes_head:
                tensor = normalize(tensor.float()).to(tensor.dtype)
            if not (is_head and self.spec.is_tied) and not name.endswith(REDUNDANT):
                yield CheckpointTensor(name, tensor, file)

    def _init_mem_manager(self) -> None:
        self.model_kv_layout = self._kv_layout()  # of all pipeline stages
        self.kv_layout = self.model_kv_layout.of_layers(spec.layer_num for spec in self.own_layer_specs)
        self.set_kv_size(self.args.max_total_token_num)
        self.req_manager = ReqManager(self.args.max_reqs, self.args.max_req_total_len, self.device)

    def set_kv_size(self, size: int, group_sizes: tuple[int, ...] = ()) -> None:
        """Allocate an empty KV cache of ``size`` tokens. KV groups may have pools of their own."""
        self.mem_manager = MemoryManager(size, self.kv_layout, self.device, group_sizes)
        if group_sizes:
            self.req_manager.set_num_groups(len(group_sizes))

    def _kv_layout(self) -> KvLayout:
        """What a token stores in each layer: keys and values, in groups of layers with the same heads."""
        layers: dict[tuple[int, int, int | None], list[int]] = {}
        for spec in self.layer_specs:
            if not spec.has_attention or not spec.is_causal:
                continue
            key = spec.kv_heads_of_rank(self.tp.size), spec.head_dim, spec.window
            layers.setdefault(key, []).append(spec.layer_num)
        dtype, scale_dtype = kv_storage(self.args.kv_dtype, self.args.dtype)
        return KvLayout(
            tuple(
                KvGroup(tuple(numbers), heads, dim, dim, dtype, scale_dtype, window)
                for (heads, dim, window), numbers in layers.items()
            )
        )

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
        infer_state.init_some_extra_state(self, step.input_ids)
        forward = self._context_forward if step.is_prefill else self._token_forward
        with uses_adapters(self.lora, step.lora):
            return HiddenStates(forward(step.input_ids, infer_state), infer_state)

    def send_to_next_stage(self, hidden: HiddenStates) -> None:
        """Let the next pipeline stage continue with these hidden states. It does not wait until they are there."""
        residual = hidden.infer_state.residual
        self.hidden_state_link.send(torch.stack([hidden.output] if residual is None else [hidden.output, residual]))

    @property
    def has_kv(self) -> bool:
        """Whether there is a KV cache. Without one, a step computes whole texts."""
        return all(spec.is_causal for spec in self.layer_specs)

    @torch.inference_mode()
    def final_states(self, hidden: HiddenStates, rows: Tensor | None = None) -> Tensor:
        """The hidden states after the final norm, of ``rows`` or of all tokens: ``[rows, hidden]``.

        ``hidden`` is not valid after a call without ``rows``.
        """
        return self.post_infer.final_states(hidden.output, hidden.infer_state, self.pre_post_weight, rows)

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
        self._observe_embedding(x)
        for layer, weight in zip(self.layers_infer, self.layer_weights, strict=True):
            infer_state.use_pool_of(layer.layer_num)
            x = layer.context_forward(x, infer_state, weight)
            self._observe_layer(layer.layer_num, x, infer_state)
        return x

    def _token_forward(self, input_ids: Tensor, infer_state: InferStateInfo) -> Tensor:
        x = self.pre_infer.token_forward(input_ids, infer_state, self.pre_post_weight)
        self._observe_embedding(x)
        for layer, weight in zip(self.layers_infer, self.layer_weights, strict=True):
            infer_state.use_pool_of(layer.layer_num)
            x = layer.token_forward(x, infer_state, weight)
            self._observe_layer(layer.layer_num, x, infer_state)
        return x

    def _observe_embedding(self, x: Tensor) -> None:
        if self.observer is not None:
            self.observer.observe("embedding", x)

    def _observe_layer(self, layer_num: int, output: Tensor, infer_state: InferStateInfo) -> None:
        """Report the sum that the next norm computes."""
        if self.observer is not None and infer_state.residual is not None:
            self.observer.observe(f"layers.{layer_num}", infer_state.residual + output)


def _modules(pre_post: PreAndPostLayerWeight, layers: list[TransformerLayerWeight]) -> set[str]:
    """The modules that have tensors in the checkpoint."""
    return {piece.name.rpartition(".")[0] for layer in (pre_post, *layers) for piece in layer.pieces()}
