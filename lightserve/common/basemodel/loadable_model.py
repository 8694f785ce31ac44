from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from lightserve.common.basemodel.kv_scales import KvScales
from lightserve.common.basemodel.layer_weights.decoder import DecoderLayerWeight, DecoderPreAndPostWeight
from lightserve.common.basemodel.layer_weights.key_scaling import warn_of_large_keys
from lightserve.common.basemodel.layer_weights.layer_weight import PreAndPostLayerWeight, TransformerLayerWeight
from lightserve.common.basemodel.layer_weights.loader import check_part, check_weights, fill_dummy, load_weights
from lightserve.common.basemodel.layer_weights.weight import WeightContext
from lightserve.common.basemodel.lora import LoraArgs, LoraPool
from lightserve.common.basemodel.merge_lora import check_merge, merged
from lightserve.common.basemodel.pipeline import layers_of_stage
from lightserve.common.basemodel.pooling import with_outer_prefix
from lightserve.common.basemodel.spec import LayerSpec, ModelSpec, activation_of
from lightserve.common.checkpoint.piece import total_size
from lightserve.common.checkpoint.reader import CheckpointTensor
from lightserve.common.kv.mem_manager import TakeMemory
from lightserve.common.parallel import Parallel, RankGroup
from lightserve.common.quantization import experts_method_factory, linear_method_factory
from lightserve.errors import ModelFilesError, ServerError
from lightserve.model_files.config.model_config import ModelConfig
from lightserve.model_files.config.text_part import is_of_other_part, text_name
from lightserve.model_files.lora.adapter import Adapter, LinearSize, check_base
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.source import ModelSource

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
    state_dtype: torch.dtype = torch.float32  # in which matrices of recurrent layers are stored
    pooling: PoolingConfig | None = None  # what the model computes instead of text
    lora: LoraArgs | None = None  # None: the model takes no adapters
    keeps_routed_experts: bool = False  # of every token in the KV cache
    take_kv_memory: TakeMemory | None = None  # of a device, for the KV cache; None: torch's
    stored_dtype: torch.dtype | None = None  # of weights of products that are not quantised; None: dtype
    packed_input_bits: int | None = None  # of products with packed weights on a CPU; None: as the model needs
    merged_adapter: Adapter | None = None  # added to the weights while they are loaded
    source: ModelSource | None = None  # the model's files, for a model that does not load them from ``checkpoint``


class LoadableModel:
    """One rank's weights of a model: built from its specs, checked before anything is loaded, loaded in place.

    Steps need more than weights: ``TpPartBaseModel`` adds the KV cache and the layers that compute.
    """

    pre_and_post_weight_class: ClassVar[type[PreAndPostLayerWeight]] = DecoderPreAndPostWeight
    transformer_weight_class: ClassVar[type[TransformerLayerWeight]] = DecoderLayerWeight

    # attention can read the keys and values of the step itself, for texts whose tokens see all others
    attends_without_cache: ClassVar[bool] = True

    # of tensors that the model does not read, because they are of layers for drafts
    unused_prefixes: ClassVar[tuple[str, ...]] = ()

    # what args.kv_dtype may be; a model whose attention reads other caches has fewer
    kv_dtypes: ClassVar[tuple[str, ...]] = ("fp8", "int8")
    has_fixed_kv_scales: ClassVar[bool] = True  # in fp8: weights of the layers; else each token has its own

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

    def _init_config(self) -> None:
        self.config = self.args.config

    def _init_specs(self) -> None:
        self.spec = self.model_spec()
        self.layer_specs = [self.layer_spec(i) for i in range(self.config.num_layers)]
        pooling = self.args.pooling
        if pooling is not None:
            self.spec = replace(self.spec, pooling=pooling, has_lm_head=pooling.answers is not None)
            self.layer_specs = [replace(spec, is_causal=pooling.is_causal) for spec in self.layer_specs]
        stage_layers = layers_of_stage(self.config.num_layers, self.pp)
        self.own_layer_specs = self.layer_specs[stage_layers.start : stage_layers.stop]  # those of this pipeline stage

    def mtp_layer_spec(self, prefix: str) -> LayerSpec:
        """The layer for drafts of the checkpoint: its number follows those of the model. ``prefix``: of its tensors."""
        like = next(spec for spec in reversed(self.layer_specs) if spec.mixer is None)
        names = replace(like.names, layers=prefix, has_numbers=False)
        return replace(like, layer_num=self.config.num_layers, names=names)

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
        is_recurrent = any(spec.mixer is not None for spec in self.layer_specs)
        if not self.has_kv and (is_recurrent or not self.attends_without_cache):
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

    @property
    def has_kv(self) -> bool:
        """Whether there is a KV cache. Without one, a step computes whole texts."""
        return all(spec.is_causal for spec in self.layer_specs)

    def _init_weights(self) -> None:
        self.check_adapters()
        self._check_metadata()
        lora = self.args.lora
        self.lora = None if lora is None else LoraPool(lora, self.args.dtype, self.device)
        self.pre_post_weight, self.layer_weights = self._new_weights(self.device, self.lora)
        if self.uses_fixed_kv_scales:
            scales = self._kv_scales()
            for spec, weight in zip(self.own_layer_specs, self.layer_weights, strict=True):
                weight.kv_scales = scales.of_layer(spec, self.tp).to(self.device)
        if self.args.checkpoint is None:
            fill_dummy([self.pre_post_weight, *self.layer_weights])
        else:
            self.load_weights(self.args.checkpoint)
        if self.lora is not None:
            self.lora.allocate()

    def load_weights(
        self, checkpoint: Iterable[CheckpointTensor], report_missing: Callable[[int], None] = lambda count: None
    ) -> None:
        """Write a checkpoint into the weights, for the first time or again. ``report_missing``: see the loader.

        Every tensor stays where the first load put it, so captured graphs compute with the new weights. The KV cache is
        that of the weights before, and so are the factors of adapters that were loaded before (``key_scaling.py``).
        Raises CheckpointError for a checkpoint that does not fit. Then some weights are those of the new checkpoint and
        others are not: no step may run until another load succeeds.
        """
        layers, scales = [self.pre_post_weight, *self.layer_weights], self._kv_scales()
        tensors = scales.removed_from(self.merged_checkpoint(checkpoint))
        load_weights(layers, tensors, self.config.num_layers, self._names_of_all_stages(), report_missing)
        if not self.uses_fixed_kv_scales:
            return
        warn_of_large_keys(self.layer_weights)
        for spec, weight in zip(self.own_layer_specs, self.layer_weights, strict=True):
            assert weight.kv_scales is not None
            weight.kv_scales.copy_(scales.of_layer(spec, self.tp))

    def _new_weights(
        self, device: torch.device, lora: LoraPool | None = None, of_all_stages: bool = False
    ) -> tuple[PreAndPostLayerWeight, list[TransformerLayerWeight]]:
        parallel, specs = self.args.parallel, self.own_layer_specs
        if of_all_stages:
            parallel, specs = replace(parallel, pp=RankGroup()), self.layer_specs
        context = replace(self.weight_context(device), parallel=parallel, lora=lora)
        layers = [self.transformer_weight_class(spec, context) for spec in specs]
        pre_post = self.pre_and_post_weight_class(self.spec, context)
        if self.config.quantization is not None and parallel.pp.size == 1:  # a stage lacks modules of others
            pieces = (piece for layer in (pre_post, *layers) for piece in layer.pieces())
            self.config.quantization.check_modules(dict.fromkeys(piece.name.rpartition(".")[0] for piece in pieces))
        return pre_post, layers

    def weight_context(self, device: torch.device) -> WeightContext:
        """Of weights that take no adapters."""
        linears = linear_method_factory(self.config, self.args.packed_input_bits, self.args.stored_dtype)
        experts = experts_method_factory(self.config, self.args.packed_input_bits, self.args.stored_dtype)
        quantizes_kv = self.args.kv_dtype is not None
        return WeightContext(self.args.parallel, self.args.dtype, device, linears, experts, quantizes_kv)

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

    def _adapted(self, checkpoint: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """A checkpoint of a model without a head for text may lack the prefix ``model.`` of its names."""
        checkpoint = (tensor for tensor in checkpoint if not tensor.name.startswith(self.unused_prefixes))
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

    def merged_checkpoint(self, checkpoint: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """``adapt_checkpoint``, with the adapter that is merged into the weights."""
        adapted, adapter = self._adapted(checkpoint), self.args.merged_adapter
        if adapter is None:
            return adapted
        return merged(adapted, self.own_names(adapter), any(spec.is_transposed for spec in self.layer_specs))

    def _names_of_all_stages(self) -> set[str]:
        """The tensors of the checkpoint that some pipeline stage uses. Empty: there is one stage."""
        if self.pp.size == 1:
            return set()
        pre_post, layers = self._new_weights(torch.device("meta"), of_all_stages=True)
        return {piece.name for layer in (pre_post, *layers) for piece in layer.pieces()}

    @classmethod
    def unused_tensors(cls, args: ModelArgs) -> list[str]:
        """Check ``args.tensor_metadata`` as loading does, and return the tensors that the model does not use."""
        model = cls.__new__(cls)
        model._init_args(args)
        return model._check_metadata()

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

    def check_part(self, tensor_metadata: Iterable[CheckpointTensor]) -> set[str]:
        """Check some tensors that ``load_weights`` shall get, on the meta device. Nothing is changed.

        Returns the names of the weights that they fill: none, for a tensor that the model computes itself.
        """
        pre_post, layers = self._new_weights(torch.device("meta"), of_all_stages=True)
        return check_part([pre_post, *layers], self._kv_scales().removed_from(self._adapted(tensor_metadata)))

    @classmethod
    def adapter_sizes(cls, args: ModelArgs) -> dict[str, LinearSize]:
        """The linears of a model that take adapters. Nothing is loaded."""
        model = cls.__new__(cls)
        model._init_args(args)
        pool = LoraPool(LoraArgs(0, 0), args.dtype, torch.device("meta"))
        model._new_weights(pool.device, pool)
        return pool.sizes()

    def check_adapters(self) -> None:
        """Check adapters against linears on the meta device, before anything is loaded."""
        lora, merged_adapter = self.args.lora, self.args.merged_adapter
        if not (lora and lora.checked) and merged_adapter is None:
            return
        if merged_adapter is not None:
            check_merge(self.own_names(merged_adapter), self._lora_targets[0], self.spec)
        for adapter in lora.checked if lora else ():
            self.check_adapter(adapter)

    def check_adapter(self, adapter: Adapter) -> Adapter:
        """Raise if the adapter does not fit this model; otherwise return it with the names that the weights declare."""
        adapter = self.own_names(adapter)
        check_base(adapter, *self._lora_targets)
        return adapter

    @cached_property
    def _lora_targets(self) -> tuple[dict[str, LinearSize], set[str]]:
        """The linears of all pipeline stages that take adapters, and the names of all modules."""
        pool = LoraPool(LoraArgs(0, 0), self.args.dtype, torch.device("meta"))
        layers = self._new_weights(pool.device, pool, of_all_stages=True)
        return pool.sizes(), _modules(*layers)

    def own_names(self, adapter: Adapter) -> Adapter:
        """The adapter with the names that the weights declare."""
        return replace(adapter, modules={self.own_name(name): module for name, module in adapter.modules.items()})

    def own_name(self, name: str) -> str:
        """The name of a tensor or a module as the weights declare it."""
        name = name if self.config.multimodal_type is None else text_name(name)
        return name.removeprefix(self.spec.names.optional_prefix)

    def _kv_scales(self) -> KvScales:
        return KvScales(self.layer_specs, is_fp8=self.uses_fixed_kv_scales)

    @property
    def uses_fixed_kv_scales(self) -> bool:
        return self.has_fixed_kv_scales and self.args.kv_dtype == "fp8"

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

    @property
    def fp8_share(self) -> float:
        """The part of the layers' weights whose products are computed in fp8."""
        size = total_size(layer.stored_size() for layer in self.layer_weights)
        return size.num_in_fp8 / max(size.num_weights, 1)


def _modules(pre_post: PreAndPostLayerWeight, layers: list[TransformerLayerWeight]) -> set[str]:
    """The modules that have tensors in the checkpoint."""
    return {piece.name.rpartition(".")[0] for layer in (pre_post, *layers) for piece in layer.pieces()}
