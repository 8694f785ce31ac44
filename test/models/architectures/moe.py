"""Mixtures of experts. Tokens choose a few of many experts, and sizes are odd."""

from __future__ import annotations

from typing import Any

from test.models.architectures.case import SMALL, Case, without

WINDOW = 24
MOE = {**SMALL, "num_experts_per_tok": 3}
QWEN = {**MOE, "num_experts": 10, "moe_intermediate_size": 28}
GLM = {
    **MOE,
    "n_routed_experts": 12,
    "moe_intermediate_size": 28,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

HALF_ROTARY = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


def clamp_as_configured(hf: Any) -> Any:
    """transformers 5.17 clamps the experts of gpt-oss at 7 whatever the config says."""
    for module in hf.modules():
        if hasattr(module, "limit"):
            module.limit = hf.config.swiglu_limit
    return hf


CASES = {
    "mixtral": Case("mixtral", {**SMALL, "num_local_experts": 7}),
    "mixtral-window": Case("mixtral", {**SMALL, "num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2_moe": Case("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 44, "mlp_only_layers": [1]}),
    "qwen2_moe-norm": Case(
        "qwen2_moe",
        {**QWEN, "shared_expert_intermediate_size": 28, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": Case("qwen3_moe", {**QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-window": Case(
        "qwen3_moe", {**QWEN, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen2_moe-window": Case(
        "qwen2_moe", {**QWEN, "use_sliding_window": True, "sliding_window": WINDOW}, without("layer_types")
    ),
    "qwen3_moe-dense": Case(
        "qwen3_moe", {**QWEN, "mlp_only_layers": [0], "attention_bias": True, "tie_word_embeddings": True}
    ),
    "olmoe": Case("olmoe", {**MOE, "num_experts": 9}),
    "olmoe-clip": Case(
        "olmoe", {**MOE, "num_experts": 9, "attention_bias": True, "norm_topk_prob": True, "clip_qkv": 0.1}
    ),
    "granitemoe": Case(
        "granitemoe",
        {
            **MOE,
            "num_local_experts": 8,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "glm4_moe": Case("glm4_moe", {**GLM, "use_qk_norm": True, "attention_bias": True, "head_dim": 16}),
    "glm4_moe-groups": Case("glm4_moe", {**GLM, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "minimax_m2": Case(
        "minimax_m2",  # transformers 5.17 does not read rotary_dim
        {**MOE, "num_local_experts": 8, "head_dim": 16, "rotary_dim": 8, "rope_parameters": HALF_ROTARY},
    ),
    "gpt_oss": Case(
        "gpt_oss",
        {**MOE, "num_local_experts": 8, "head_dim": 16, "sliding_window": WINDOW, "swiglu_limit": 0.15},
        adapt_oracle=clamp_as_configured,
    ),
}
