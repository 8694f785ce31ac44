"""ERNIE 4.5, Hunyuan, dots.llm1 and other mixtures of experts since 2025."""

from __future__ import annotations

import torch

from test.models.architectures import converted
from test.models.architectures.case import SMALL as SMALL_LLAMA, Case, Json, Tensors, without
from test.models.architectures.dense_c import FACTORS, FIXED_NTK

SMALL = {**SMALL_LLAMA, "num_hidden_layers": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = 24
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 28}
ROUTED = {
    **SMALL,
    **EXPERTS,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
ERNIE = {**SMALL, "moe_k": 3, "moe_num_experts": 10, "moe_intermediate_size": 28, "tie_word_embeddings": False}
GRANITE = {**SMALL, **FACTORS, "num_local_experts": 8, "num_experts_per_tok": 3}
MIMO = {
    **SMALL,
    **EXPERTS,
    "n_routed_experts": 12,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": WINDOW,
    "attention_value_scale": 0.6,
}
AFMOE = {
    **SMALL,
    **EXPERTS,
    "head_dim": 16,
    "num_experts": 10,
    "num_shared_experts": 2,
    "sliding_window": WINDOW,
    "global_attn_every_n_layers": 3,
}
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _published_mimo(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As on the hub: other fields for the kinds of layers."""
    kinds, rope = config.pop("layer_types"), config.pop("rope_parameters")
    return {
        **config,
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.pop("mlp_layer_types")],
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        "swa_num_key_value_heads": 2,
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "sliding_window_size": config["sliding_window"] - 1,
        "sliding_window": config["sliding_window"] - 1,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "routed_scaling_factor": None,
        "layernorm_epsilon": config.pop("rms_norm_eps"),
    }, tensors


def _published_mimo_v2(config: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As on the hub: of q, k and v each of two ranks wrote its heads, one rank after the other."""
    config, tensors = _published_mimo(config, tensors)
    done = {name: tensor for name, tensor in tensors.items() if not name.endswith(QKV)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        by_rank = zip(*(tensors[f"{at}.{part}_proj.weight"].chunk(2) for part in "qkv"), strict=True)
        done[f"{at}.qkv_proj.weight"] = torch.cat([part for parts in by_rank for part in parts])
    fields = {"swa_num_key_value_heads": 4, "attention_projection_layout": "fused_qkv"}
    return {**config, **fields, "model_type": "mimo_v2"}, {**done, "visual.patch.weight": done["model.norm.weight"]}


CASES = {
    "ernie4_5_moe": Case("ernie4_5_moe", {**ERNIE, "moe_num_shared_experts": 2}),
    "ernie4_5_moe-layers": Case(
        "ernie4_5_moe",
        {
            **ERNIE,
            "num_hidden_layers": 5,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 3,
        },
    ),
    "hunyuan_v1_moe": Case(
        "hunyuan_v1_moe",
        {**SMALL, "head_dim": 16, "num_experts": 8, "moe_topk": 3, "rope_parameters": FIXED_NTK},
    ),
    "dots1": Case("dots1", {**ROUTED, "head_dim": 16, "first_k_dense_replace": 1}),
    "dots1-window": Case(
        "dots1",
        {**ROUTED, "attention_bias": True, "norm_topk_prob": False, "sliding_window": WINDOW, "max_window_layers": 1},
        without("layer_types"),
    ),
    "afmoe": Case(
        "afmoe",
        {**AFMOE, "num_hidden_layers": 5, "num_dense_layers": 2, "mup_enabled": True, "route_scale": 1.7},
        without("layer_types"),
    ),
    "afmoe-listed": Case(
        "afmoe",
        {**AFMOE, "num_dense_layers": 0, "layer_types": ["full_attention", "sliding_attention"]},
        lambda config, tensors: ({**config, "score_func": "sigmoid", "route_norm": True, "n_group": 1}, tensors),
    ),
    "granitemoeshared": Case("granitemoeshared", {**GRANITE, "shared_intermediate_size": 44}),
    "granitemoeshared-none": Case("granitemoeshared", {**GRANITE, "shared_intermediate_size": 0}),
    "granitemoe_swa": Case(
        "granitemoe_swa",
        {
            **GRANITE,
            "shared_intermediate_size": 44,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention"],
            "layer_rope_theta": [0, 5000.0],
        },
    ),
    "solar_open": Case("solar_open", {**ROUTED, "head_dim": 16, "attention_bias": True}),
    "flex_olmo": Case("flex_olmo", {**SMALL, "num_experts": 7, "num_experts_per_tok": 3}),
    "flex_olmo-norm": Case(
        "flex_olmo",
        {**SMALL, "num_experts": 5, "num_experts_per_tok": 2, "attention_bias": True, "norm_topk_prob": True},
    ),
    "exaone_moe": Case(
        "exaone_moe",
        {
            **SMALL,
            **EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 10,
            "num_shared_experts": 2,
            "sliding_window": WINDOW,
        },
        without("layer_types", "mlp_layer_types"),
    ),
    "exaone_moe-listed": Case(
        "exaone_moe",
        {
            **SMALL,
            **EXPERTS,
            "num_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "hy_v3": Case("hy_v3", {**SMALL, **EXPERTS, "head_dim": 16, "num_experts": 10, "num_shared_experts": 2}),
    "hy_v3-listed": Case(
        "hy_v3",
        {
            **SMALL,
            **EXPERTS,
            "head_dim": 8,
            "num_experts": 6,
            "router_scaling_factor": 1.5,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "mellum": Case(
        "mellum",
        {
            **SMALL,
            **EXPERTS,
            "head_dim": 16,
            "num_experts": 10,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mellum-listed": Case(
        "mellum",
        {**SMALL, **EXPERTS, "head_dim": 8, "num_experts": 6, "mlp_layer_types": ["dense", "sparse"]},
        without("layer_types"),
    ),
    "bailing_moe": Case(
        "qwen2_moe",
        {**SMALL, **EXPERTS, "num_experts": 10, "shared_expert_intermediate_size": 56, "qkv_bias": False},
        converted.to_bailing,
        converted.without_shared_gate,
    ),
    "bailing_moe_v2": Case(
        "glm4_moe",
        {
            **ROUTED,
            "head_dim": 16,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
        converted.to_bailing_v2,
    ),
    "mimo_v2_flash": Case("mimo_v2_flash", {**MIMO, "num_hidden_layers": 3}, _published_mimo),
    "mimo_v2": Case(
        "mimo_v2_flash",
        {**MIMO, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2},
        _published_mimo_v2,
    ),
    "mimo_v2_flash-equal": Case(
        "mimo_v2_flash",
        {
            **MIMO,
            "attention_bias": True,
            "v_head_dim": 24,
            "attention_value_scale": None,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "routed_scaling_factor": 1.5,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
}
