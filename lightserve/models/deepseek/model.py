"""DeepSeek V2 and V3, and Kimi K2: latent attention, and experts behind the first dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from lightserve.common import basemodel as bm, ops
from lightserve.models.glm4_moe.model import deepseek_v3_moe

LATENT_NORM_EPS = 1e-6  # of the norms inside attention; rms_norm_eps is that of the others


def latent_sizes(config: bm.ModelConfig, heads: int) -> ops.LatentSizes:
    sizes = (config.count(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    return ops.LatentSizes(heads, *sizes)


class DeepseekLayerWeight(bm.DecoderLayerWeight):
    attention_name: ClassVar[str] = "self_attn"

    def _init_attention(self, spec: bm.LayerSpec, context: bm.WeightContext) -> None:
        at, config, hidden = f"{spec.prefix}.{self.attention_name}", spec.config, spec.hidden_size
        sizes = latent_sizes(config, spec.num_heads)
        q_rank = config.hf.get("q_lora_rank")
        query = _rows(spec.num_heads, sizes.nope, spec)
        kv_a = bm.Block(f"{at}.kv_a_proj_with_mqa", 1, sizes.rank + sizes.rope, _rows(1, sizes.rank, spec))
        if q_rank is None:
            first = bm.Block(f"{at}.q_proj", spec.num_heads, sizes.nope + sizes.rope, query)
        else:
            first = bm.Block(f"{at}.q_a_proj", 1, config.count("q_lora_rank"))
            q_b = bm.Block(f"{at}.q_b_proj", spec.num_heads, sizes.nope + sizes.rope, query)
            self.q_a_norm = bm.RmsNormWeight(f"{at}.q_a_layernorm", q_rank, LATENT_NORM_EPS, context)
            self.q_b_proj = bm.ColumnWeight([q_b], q_rank, context)
        gate = spec.names.head_gate
        gates = [] if gate is None else [bm.Block(f"{spec.prefix}.{gate}", spec.num_heads)]
        self.qkv_proj = bm.ColumnWeight([first, kv_a, *gates], hidden, context)
        self.kv_norm = bm.RmsNormWeight(f"{at}.kv_a_layernorm", sizes.rank, LATENT_NORM_EPS, context)
        kv_b = bm.Block(f"{at}.kv_b_proj", spec.num_heads, sizes.nope + sizes.value)
        # ops read the weight itself, so no adapter can add to its product
        plain = replace(context, linear_method_factory=bm.float_method_factory(config), lora=None)
        self.kv_b_proj = bm.ColumnWeight([kv_b], sizes.rank, plain)
        assert isinstance(self.kv_b_proj.method, bm.UnquantizedLinear)
        self.kv_b = self.kv_b_proj.method.weight.view(-1, kv_b.dim, sizes.rank)  # [heads, nope + value, rank]
        self.o_proj = bm.RowWeight(f"{spec.prefix}.{spec.names.o}", spec.num_heads * sizes.value, hidden, context)
        self.attn_options = ops.AttnOptions(spec.scale)


class DeepseekLayerInfer(bm.DecoderLayerInferTpl[DeepseekLayerWeight]):
    def __init__(self, spec: bm.LayerSpec, tp: bm.RankGroup) -> None:
        super().__init__(spec, tp)
        self.sizes = latent_sizes(spec.config, self.num_heads)
        self.has_q_rank = spec.config.hf.get("q_lora_rank") is not None

    def _norm_and_qkv(
        self, input: Tensor, infer_state: bm.InferStateInfo, layer_weight: DeepseekLayerWeight
    ) -> tuple[Tensor, Tensor]:
        """Queries ``[tokens, heads, nope + rope]`` and latents ``[tokens, rank + rope]``."""
        q, latent = super()._norm_and_qkv(input, infer_state, layer_weight)
        if self.has_q_rank:
            q = layer_weight.q_b_proj.mm(layer_weight.q_a_norm.norm(q))
        return q.view(len(q), self.num_heads, self.sizes.nope + self.sizes.rope), latent

    def _split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        width = self.sizes.rank + self.sizes.rope
        return qkv[:, :-width], qkv[:, -width:]

    def _rotate_and_store(
        self, q: Tensor, cache_kv: Tensor, infer_state: bm.InferStateInfo, layer_weight: DeepseekLayerWeight
    ) -> None:
        norm = ops.LatentNorm(layer_weight.kv_norm.tensor, layer_weight.kv_norm.eps)
        angles = infer_state.rotary_angles.get(self._rotary_key)
        cache = self._latent_cache(infer_state)
        ops.write_latent(q, cache_kv, norm, angles, infer_state.step.mem_index, cache)

    def _context_attention_kernel(
        self, q: Tensor, cache_kv: Tensor, infer_state: bm.InferStateInfo, layer_weight: DeepseekLayerWeight
    ) -> Tensor:
        cache, kv_b = self._latent_cache(infer_state), layer_weight.kv_b
        return ops.latent_context_attention(q, cache_kv, cache, kv_b, infer_state.attn, layer_weight.attn_options)

    def _token_attention_kernel(
        self, q: Tensor, infer_state: bm.InferStateInfo, layer_weight: DeepseekLayerWeight
    ) -> Tensor:
        cache, kv_b = self._latent_cache(infer_state), layer_weight.kv_b
        return ops.latent_token_attention(q, cache, kv_b, infer_state.attn, layer_weight.attn_options)

    def _latent_cache(self, infer_state: bm.InferStateInfo) -> ops.LatentCache:
        memory, layer = infer_state.mem_manager, self.layer_num
        cache, scales, key_parts = memory.layer(layer), memory.scales(layer), memory.key_parts(layer)
        return cache if scales is None or key_parts is None else ops.QuantizedLatents(cache, scales, key_parts)


class DeepseekTpPartModel(bm.TpPartBaseModel):
    transformer_weight_class = DeepseekLayerWeight
    transformer_layer_infer_class = DeepseekLayerInfer
    attends_without_cache = False
    attends_to_shared_prefixes = False
    has_fixed_kv_scales = False

    def layer_spec(self, layer_num: int) -> bm.LayerSpec:
        sizes = latent_sizes(self.config, self.config.num_heads)
        return replace(
            super().layer_spec(layer_num),
            num_kv_heads=1,
            head_dim=sizes.rope,  # all of it rotates
            scale=(sizes.nope + sizes.rope) ** -0.5 * _yarn_scale(self.config.rope) ** 2,
            has_rope_pairs=self.config.flag("rope_interleave", default=True),
            moe=self._moe() if self._is_sparse(layer_num) else None,
        )

    def _is_sparse(self, layer_num: int) -> bool:
        first, step = self.config.count_or_0("first_k_dense_replace"), self.config.count("moe_layer_freq", default=1)
        return layer_num >= first and layer_num % step == 0

    def _moe(self) -> bm.MoeSpec:
        """Of V3: the experts of the groups with the best pairs, by sigmoid and a bias."""
        self.config.check_value("scoring_func", "sigmoid")
        self.config.check_value("topk_method", "noaux_tc")
        return deepseek_v3_moe(self.config)

    def _kv_layout(self) -> bm.KvLayout:
        sizes = latent_sizes(self.config, 1)
        layers = tuple(spec.layer_num for spec in self.layer_specs if spec.has_attention)
        layout = bm.KvLayout.latents(layers, (sizes.rank, sizes.rope), self.args.kv_dtype, self.args.dtype)
        states = bm.state_groups(self.layer_specs, self.tp.size, self.args.dtype, self.args.state_dtype)
        return replace(layout, states=states)

    def _verify_params(self) -> None:
        for name in ("attention_bias", "mlp_bias"):
            self.config.check_value(name, False)


class DeepseekV2TpPartModel(DeepseekTpPartModel):
    def _moe(self) -> bm.MoeSpec:
        """By softmax, from all experts or from those of the groups with the best."""
        config = self.config
        config.check_value("scoring_func", "softmax")
        config.check_value("topk_method", "greedy", "group_limited_greedy")
        config.check_value("norm_topk_prob", False)
        is_grouped = config.hf.get("topk_method") == "group_limited_greedy"
        route = ops.RouteSpec(
            bm.top_k_of(config),
            groups=config.count("n_group") if is_grouped else 1,
            top_groups=config.count("topk_group") if is_grouped else 1,
            scale=config.number("routed_scaling_factor", default=1.0),
        )
        return replace(deepseek_v3_moe(config), route=route, has_score_bias=False)


def _rows(heads: int, skipped: int, spec: bm.LayerSpec) -> bm.RowMap | None:
    """The last rows of each head rotate; the file has rotary pairs side by side."""
    if not spec.has_rope_pairs:
        return None
    return bm.pairs_to_halves(bm.whole(heads, skipped + spec.head_dim), heads, spec.head_dim, first=skipped)


def _yarn_scale(rope: bm.RopeConfig) -> float:
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return bm.yarn_mscale(rope, rope.mscale_all_dim)
