"""The language model of Llama 4: chunks in most layers, no positions in the others, an expert by its scaled input."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.errors import ModelFilesError
from lightserve.models.llama4.chunks import ChunkedInferState

FFN = "feed_forward"
NAMES = bm.LayerNames(gate=f"{FFN}.gate_proj", up=f"{FFN}.up_proj", down=f"{FFN}.down_proj")
MOE_NAMES = bm.MoeNames(
    router=f"{FFN}.router",
    experts=f"{FFN}.experts",
    shared=f"{FFN}.shared_expert",
    shared_expert=bm.ExpertNames(),  # it reads the hidden states as they are
)


class ChunkedLayerWeight(bm.DecoderLayerWeight):
    """The KV cache has a window of this size: a token sees at most its chunk, which fits into the window."""

    def _init_attention(self, spec: bm.LayerSpec, context: bm.WeightContext) -> None:
        super()._init_attention(spec, context)
        self.attn_options = replace(self.attn_options, window=None)


class ChunkedLayerInfer(bm.DecoderLayerInferTpl[ChunkedLayerWeight]):
    def _context_attention_kernel(
        self, q: Tensor, cache_kv: Tensor, infer_state: bm.InferStateInfo, layer_weight: ChunkedLayerWeight
    ) -> Tensor:
        cache = self._kv_cache(infer_state, layer_weight)
        return ops.context_attention(q, cache_kv, cache, self._batch(infer_state), layer_weight.attn_options)

    def _token_attention_kernel(
        self, q: Tensor, infer_state: bm.InferStateInfo, layer_weight: ChunkedLayerWeight
    ) -> Tensor:
        cache = self._kv_cache(infer_state, layer_weight)
        return ops.token_attention(q, cache, self._batch(infer_state), layer_weight.attn_options)

    def _batch(self, infer_state: bm.InferStateInfo) -> ops.AttnBatch:
        assert isinstance(infer_state, ChunkedInferState)
        return infer_state.attn if self.spec.window is None else infer_state.chunks(self.spec.window)


class Llama4TpPartModel(bm.TpPartBaseModel):
    transformer_weight_class = ChunkedLayerWeight
    transformer_layer_infer_class = ChunkedLayerInfer
    infer_state_class = ChunkedInferState
    attends_without_cache = False

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, spec = self.config, super().layer_spec(layer_num)
        has_positions, has_experts = self._has_positions(layer_num), self._has_experts(layer_num)
        has_bias = config.flag("attention_bias")
        return replace(
            spec,
            names=NAMES,
            intermediate_size=config.intermediate_size if has_experts else config.count("intermediate_size_mlp"),
            moe=self._moe() if has_experts else None,
            window=config.window_of(layer_num),
            rope=spec.rope if has_positions else None,
            has_rope_pairs=has_positions,
            qk_norm=bm.QkNorm.HEAD_NO_WEIGHT if has_positions and config.flag("use_qk_norm", default=True) else None,
            query_scale=None if has_positions else self._query_scale(),
            qkv_bias=has_bias,
            o_bias=has_bias,
        )

    def _has_positions(self, layer_num: int) -> bool:
        return bool(self.config.hf["no_rope_layers"][layer_num])

    def _has_experts(self, layer_num: int) -> bool:
        layers = self.config.hf.get("moe_layers")
        if layers is not None:
            if not isinstance(layers, list):
                actual = reprlib.repr(layers)
                raise ModelFilesError(f"config.json: moe_layers is {actual}, wanted a list of numbers; correct it")
            return layer_num in layers
        return (layer_num + 1) % self.config.count("interleave_moe_layer_step", default=1) == 0

    def _query_scale(self) -> bm.QueryScale | None:
        """The first files say 4 instead of true."""
        if not self.config.hf.get("attn_temperature_tuning"):
            return None
        return bm.QueryScale(self.config.number("attn_scale"), self.config.count("floor_scale"), first=1)

    def _moe(self) -> bm.MoeSpec:
        return bm.MoeSpec(
            num_experts=bm.num_experts_of(self.config),
            intermediate_size=self.config.intermediate_size,
            route=ops.RouteSpec(bm.top_k_of(self.config), "sigmoid", renormalize=False),
            names=MOE_NAMES,
            shared_size=self.config.intermediate_size,
            scales_input=True,
        )

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        width = self.config.intermediate_size
        return bm.with_experts_apart(super().adapt_checkpoint(checkpoint), self.config.hidden_size, width)

    def _verify_params(self) -> None:
        self.config.check_value("num_experts_per_tok", 1)
