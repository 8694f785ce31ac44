"""Gemma 4: Gemma 3 with heads of another size in layers that see all tokens, which may have no value projection.

The last layers of small models have no keys and values: they read those of the last layer of their kind before. Small
models give each layer an input of its own too, and the largest one has experts beside its feed-forwards.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightserve.common import basemodel as bm
from lightserve.common.ops import RouteSpec
from lightserve.errors import ModelFilesError, ServerError
from lightserve.models.gemma2.model import LAYER_NAMES
from lightserve.models.gemma4.layer_infer import Gemma4InferState, Gemma4LayerInfer, Gemma4PreLayerInfer
from lightserve.models.gemma4.weights import Gemma4LayerWeight, Gemma4PreAndPostWeight, rounded

PER_LAYER_FIELDS = {"head_dim", "num_key_value_heads"}  # of per_layer_config


class Gemma4TpPartModel(bm.TpPartBaseModel):
    pre_and_post_weight_class = Gemma4PreAndPostWeight
    transformer_weight_class = Gemma4LayerWeight
    pre_layer_infer_class = Gemma4PreLayerInfer
    transformer_layer_infer_class = Gemma4LayerInfer
    infer_state_class = Gemma4InferState
    attends_without_cache = False

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, kind = self.config, self.config.layer_type(layer_num)
        is_windowed, has_bias = config.is_windowed(layer_num), config.flag("attention_bias")
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            head_dim=config.head_dims[layer_num],
            rope=bm.RopeConfig.from_hf(config.hf, kind),
            scale=1.0,
            window=config.window if is_windowed else None,
            kv_source=self._kv_source(layer_num),
            has_v_proj=is_windowed or not config.flag("attention_k_eq_v"),
            qk_norm=bm.QkNorm.HEAD,
            qkv_bias=has_bias,
            o_bias=has_bias,
            activation=bm.activation_of(config, "hidden_activation"),
            moe=self._moe() if config.flag("enable_moe_block") else None,
        )

    def model_spec(self) -> bm.ModelSpec:
        return replace(
            super().model_spec(),
            embedding_scale=rounded(self.config.hidden_size**0.5, self.args.dtype),
            logit_softcap=self.config.optional_number("final_logit_softcapping"),
        )

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        """Files have the experts of a layer in two tensors, and may have keys and values that no layer uses."""
        readers = [spec for spec in self.layer_specs if spec.kv_source is not None]
        unused = tuple(f"{spec.prefix}.self_attn.{linear}_" for spec in readers for linear in ("k", "v"))
        used = (tensor for tensor in super().adapt_checkpoint(checkpoint) if not tensor.name.startswith(unused))
        if not self.config.flag("enable_moe_block"):
            return used
        return bm.with_experts_apart(used, self.config.hidden_size, self.config.count("moe_intermediate_size"))

    def _kv_source(self, layer_num: int) -> int | None:
        """The last layer of the same kind that has keys and values; None: the layer has its own."""
        types = self.config.layer_types
        assert types is not None  # config_derived.gemma4
        num_readers = self.config.count_or_0("num_kv_shared_layers")
        sources = types[: max(len(types) - num_readers, 0)]
        if layer_num < len(sources):
            return None
        if types[layer_num] not in sources:
            raise ModelFilesError(
                f"config.json: num_kv_shared_layers is {num_readers} of {len(types)} layers, which leaves no "
                f"{types[layer_num]} with keys and values for layer {layer_num}; fetch config.json again"
            )
        return len(sources) - 1 - sources[::-1].index(types[layer_num])

    def _moe(self) -> bm.MoeSpec:
        return bm.MoeSpec(
            num_experts=bm.num_experts_of(self.config),
            intermediate_size=self.config.count("moe_intermediate_size"),
            route=RouteSpec(bm.top_k_of(self.config), renormalize=True),
            names=bm.MoeNames(router="router.proj", experts="experts"),
            is_beside_ffn=True,
        )

    def _verify_params(self) -> None:
        config = self.config
        config.check_value("use_bidirectional_attention", "vision", False)  # of images only
        self._verify_per_layer_config()
        size = config.count_or_0("hidden_size_per_layer_input")
        if size and config.count("vocab_size_per_layer_input") < config.vocab_size:
            raise ModelFilesError(
                f"config.json: vocab_size_per_layer_input is {config.count('vocab_size_per_layer_input')}; it must be "
                f"at least {config.vocab_size}, the size of the vocabulary"
            )
        if self.pp.size > 1 and (size or config.count_or_0("num_kv_shared_layers")):
            raise ServerError(
                f"pp={self.pp.size} is not supported for {config.model_type} with per-layer inputs or shared KV: its "
                "layers read values of layers in other stages; set pp to 1"
            )

    def _verify_per_layer_config(self) -> None:
        tables = self.config.hf.get("per_layer_config") or {}
        if not isinstance(tables, dict):
            raise ModelFilesError("config.json: per_layer_config is not an object; fetch config.json again")
        for table in tables.values():
            if not isinstance(table, dict) or table.keys() - PER_LAYER_FIELDS:
                raise ModelFilesError(
                    f"config.json: per_layer_config has {reprlib.repr(table)}, which is not supported for "
                    f"{self.config.model_type}; supported: {', '.join(sorted(PER_LAYER_FIELDS))}"
                )
