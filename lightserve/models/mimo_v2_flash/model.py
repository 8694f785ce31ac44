"""MiMo-V2-Flash: windowed layers with sinks and more KV heads, values narrower than keys, experts of DeepSeek V3.

The cache stores a value as wide as a key: the numbers behind it are 0. With 128 of 192 that is a fifth more memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.errors import ModelFilesError
from lightserve.models.glm4_moe.model import deepseek_v3_moe, is_sparse
from lightserve.models.mimo_v2_flash.fused_qkv import with_split_qkv

LAYER_NAMES = bm.LayerNames(sinks="self_attn.attention_sink_bias")
# sizes of windowed layers, which are those of the others
WINDOWED_SIZES = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}


def value_dim(spec: bm.LayerSpec) -> int:
    return spec.config.count("v_head_dim", default=spec.head_dim)


class MiMoLayerWeight(bm.DecoderLayerWeight):
    def _init_attention(self, spec: bm.LayerSpec, context: bm.WeightContext) -> None:
        at, names, values = spec.prefix, spec.names, value_dim(spec)
        blocks = [
            bm.Block(f"{at}.{names.q}", spec.num_heads, spec.head_dim),
            bm.Block(f"{at}.{names.k}", spec.num_kv_heads, spec.head_dim),
            bm.Block(f"{at}.{names.v}", spec.num_kv_heads, values),
        ]
        self.qkv_proj = bm.ColumnWeight(blocks, spec.hidden_size, context, bias=spec.qkv_bias)
        self.q_norm = self.k_norm = None
        self.sinks = bm.HeadValues(f"{at}.{names.sinks}", spec.num_heads, context) if spec.has_sinks else None
        self.o_proj = bm.RowWeight(f"{at}.{names.o}", spec.num_heads * values, spec.hidden_size, context)
        sinks = self.sinks.tensor if self.sinks else None
        self.attn_options = ops.AttnOptions(spec.scale, causal=spec.is_causal, window=spec.window, sinks=sinks)


class MiMoLayerInfer(bm.DecoderLayerInferTpl[MiMoLayerWeight]):
    def __init__(self, spec: bm.LayerSpec, tp: bm.RankGroup) -> None:
        super().__init__(spec, tp)
        self.value_dim = value_dim(spec)
        self.value_scale = spec.config.number("attention_value_scale", default=1.0)

    def _split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        dim, kv_heads = self.spec.head_dim, self.num_kv_heads
        q, k, v = qkv.split_with_sizes([self.num_heads * dim, kv_heads * dim, kv_heads * self.value_dim], dim=1)
        cache_kv = qkv.new_zeros(len(qkv), 2 * kv_heads, dim)
        cache_kv[:, :kv_heads] = k.view(len(qkv), kv_heads, dim)
        cache_kv[:, kv_heads:, : self.value_dim] = v.view(len(qkv), kv_heads, self.value_dim)
        return q.view(len(qkv), self.num_heads, dim), cache_kv

    def _get_o(self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: MiMoLayerWeight) -> Tensor:
        """Values are scaled here, where the sums of them are, so that the weights stay as they are stored."""
        values = input[..., : self.value_dim] * self.value_scale
        return layer_weight.o_proj.mm(values.flatten(-2))


class MiMoV2FlashTpPartModel(bm.TpPartBaseModel):
    transformer_weight_class = MiMoLayerWeight
    transformer_layer_infer_class = MiMoLayerInfer
    unused_prefixes: ClassVar[tuple[str, ...]] = ("model.mtp.",)

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        config, is_windowed = self.config, self.config.is_windowed(layer_num)
        sinks = "add_swa_attention_sink_bias" if is_windowed else "add_full_attention_sink_bias"
        return replace(
            super().layer_spec(layer_num),
            names=LAYER_NAMES,
            rope=bm.RopeConfig.from_hf(config.hf, config.layer_type(layer_num)),
            window=config.window if is_windowed else None,
            has_sinks=config.flag(sinks, default=is_windowed),
            qkv_bias=config.flag("attention_bias"),
            moe=deepseek_v3_moe(config) if is_sparse(config, layer_num) else None,
        )

    def mtp_layer_spec(self, prefix: str) -> bm.LayerSpec:
        """With a window, and without experts."""
        windowed = (spec for spec in reversed(self.layer_specs) if spec.window is not None)
        like = next(windowed, self.layer_specs[-1])
        names = replace(LAYER_NAMES, layers=prefix, has_numbers=False, ffn_norm="pre_mlp_layernorm")
        return replace(like, layer_num=self.config.num_layers, names=names, moe=None)

    def _verify_params(self) -> None:
        config = self.config
        if config.count("v_head_dim", default=config.head_dim) > config.head_dim:
            raise ModelFilesError(
                f"config.json: v_head_dim {config.hf['v_head_dim']} is over head_dim {config.head_dim}, which is not "
                f"supported for {config.model_type}; correct it"
            )
        for name, common_name in WINDOWED_SIZES.items():
            config.check_value(name, config.hf.get(common_name))
        config.check_value("scoring_func", "sigmoid")
        config.check_value("topk_method", "noaux_tc")


class MiMoV2TpPartModel(MiMoV2FlashTpPartModel):
    """MiMo-V2.5, whose files may have q, k and v in one tensor, and parts that read images and audio."""

    unused_prefixes: ClassVar[tuple[str, ...]] = ("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings.")

    def adapt_checkpoint(self, checkpoint: Iterable[bm.CheckpointTensor]) -> Iterator[bm.CheckpointTensor]:
        value_dim = self.config.count("v_head_dim", default=self.config.head_dim)
        return with_split_qkv(super().adapt_checkpoint(checkpoint), self.config, value_dim)

    def _verify_params(self) -> None:
        super()._verify_params()
        self.config.check_value("attention_projection_layout", "fused_qkv")
