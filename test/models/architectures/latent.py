from __future__ import annotations

from test.models.architectures.case import SMALL, Case, Json, Tensors

LATENT = {
    **SMALL,
    "num_key_value_heads": 6,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "kv_lora_rank": 20,
    "rms_norm_eps": 1e-2,  # the norms inside attention have another one
    "q_lora_rank": 24,
    "n_shared_experts": 2,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
    "rope_theta": 10000.0,
}
QUERY_SCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def as_kimi(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    return {**config_json, "model_type": "kimi_k2"}, tensors


def _without_layer_types(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As GLM-4.7-Flash was published."""
    del config_json["mlp_layer_types"]
    return config_json, tensors


GROUPS = {"n_group": 4, "topk_group": 2}
GREEDY = {**GROUPS, "topk_method": "group_limited_greedy"}

CASES = {
    "deepseek_v2": Case("deepseek_v2", {**LATENT, "q_lora_rank": None}),  # as V2-Lite
    "deepseek_v2-groups": Case("deepseek_v2", {**LATENT, **GREEDY, "rope_parameters": YARN}),
    "deepseek_v3": Case("deepseek_v3", {**LATENT, **GROUPS, "rope_parameters": YARN}),
    "deepseek_v3-halves": Case(
        "deepseek_v3", {**LATENT, **GROUPS, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 1}
    ),
    "kimi_k2": Case("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1}, as_kimi),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        {
            **LATENT,
            **GROUPS,
            "v_head_dim": 18,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "glm4_moe_lite-first": Case("glm4_moe_lite", {**LATENT, "q_lora_rank": None}, _without_layer_types),
    "mistral4": Case("mistral4", {**LATENT, "rope_parameters": QUERY_SCALE}),
    "mistral4-groups": Case(
        "mistral4",
        {
            **LATENT,
            **GROUPS,
            "rope_parameters": QUERY_SCALE,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
        },
    ),
}
