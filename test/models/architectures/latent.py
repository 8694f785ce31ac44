from __future__ import annotations

from test.models.architectures.case import MAX_LEN, SMALL, Case, Json, Tensors

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


SPARSE = {
    **LATENT,
    "index_topk": 40,
    "index_n_heads": 24,
    "index_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN_SPARSE = {**SPARSE, "rope_parameters": YARN}


def _as_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """Which layers share tokens, as GLM-5's own files say it."""
    for name in ("indexer_types", "layer_types", "mlp_layer_types", "head_dim"):
        del config_json[name]
    return {**config_json, "index_topk_freq": 2, "index_skip_topk_offset": 1}, tensors


GROUPS = {"n_group": 4, "topk_group": 2}
GREEDY = {**GROUPS, "topk_method": "group_limited_greedy"}

LING = {
    **{key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "q_lora_rank")},
    "num_hidden_layers": 4,
    "num_local_experts": 12,
    "head_dim": 12,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def _as_axk1_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    del config_json["mlp_layer_types"]
    return {**config_json, "first_k_dense_replace": 2, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}, tensors


def _with_head_dim(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """transformers 5.22 saves that of rotary positions."""
    return {**config_json, "head_dim": LING["head_dim"]}, tensors


def _as_ling_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """With the names of fields of Ling 2, and without those that follow from others."""
    names = {
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "model_max_length": "max_position_embeddings",
    }
    left_out = {"layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"}
    fields = {names.get(key, key): value for key, value in config_json.items() if key not in left_out}
    fields |= {
        "score_function": "sigmoid",
        "num_nextn_predict_layers": 1,
        "no_kda_lora": True,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {**config_json["rope_parameters"], "partial_rotary_factor": 0.5},
        "gated_attention_proj_granularity_type": "head_wise",
        "expert_swiglu_limit_list": [None] * 5,
    }
    return _with_head_dim(fields, tensors)


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
    "axk1": Case("axk1", {**LATENT, **GROUPS, "rms_norm_eps": 1e-2}),
    "axk1-published": Case(
        "axk1", {**LATENT, **GROUPS, "first_k_dense_replace": 2, "rope_interleave": False}, _as_axk1_published
    ),
    "bailing_hybrid": Case("bailing_hybrid", {**LING, "n_group": 4, "topk_group": 2}, _with_head_dim),
    "bailing_hybrid-softplus": Case(
        "bailing_hybrid",
        {
            **LING,
            "n_group": 1,
            "topk_group": 1,
            "kda_safe_gate": False,
            "short_conv_kernel_size": 3,
            "num_hidden_layers": 5,
            "layer_types": [*["linear_attention", "full_attention"] * 2, "full_attention"],
        },
        _as_ling_published,
    ),
    "deepseek_v32": Case("deepseek_v32", {**YARN_SPARSE, **GROUPS}),
    "deepseek_v32-short": Case("deepseek_v32", {**SPARSE, **GROUPS, "index_topk": MAX_LEN}),
    "glm_moe_dsa": Case(
        "glm_moe_dsa",
        {**SPARSE, "v_head_dim": 18, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        divides_among_stages=False,
    ),
    "glm_moe_dsa-published": Case(
        "glm_moe_dsa",
        {**SPARSE, "indexer_types": ["full", "shared", "full"], "first_k_dense_replace": 2},
        _as_published,
        divides_among_stages=False,
    ),
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
