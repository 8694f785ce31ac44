"""Gemma 4. Layers that see all tokens have heads of another size, and tiny windows are shorter than the prompts."""

from __future__ import annotations

from test.models.architectures.case import SMALL, Case, Json, Tensors

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    **SMALL,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 24,
    "vocab_size_per_layer_input": 137,
    "hidden_size_per_layer_input": 0,
    "rms_norm_eps": 1e-3,
}
SHARED = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 10,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 0.7,
}
EQUAL = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {**EQUAL, "enable_moe_block": True, "num_experts": 10, "top_k_experts": 3, "moe_intermediate_size": 28}
UNIFIED = {key: value for key, value in EQUAL.items() if not key.endswith("per_layer_input")}
VISION: Json = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION |= {"intermediate_size": 16, "position_embedding_size": 16, "rope_parameters": None}


def _as_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """With the fields of the hub's files, and with keys and values that no layer uses."""
    text = config_json.get("text_config", config_json)
    del text["per_layer_config"]
    text["global_head_dim"], text["num_global_key_value_heads"] = GEMMA4["global_head_dim"], None
    first = next(name for name in tensors if name.endswith("layers.0.self_attn.k_norm.weight"))
    prefix, tensor = first.partition("layers.")[0], tensors[first]
    unused = {f"{prefix}layers.{layer}.self_attn.k_norm.weight": tensor for layer in (3, 5)}
    return config_json, {**tensors, **unused}


CASES = {
    "gemma4_text": Case("gemma4_text", SHARED, divides_among_stages=False),
    "gemma4_text-published": Case("gemma4_text", SHARED, _as_published, divides_among_stages=False),
    "gemma4_text-equal": Case("gemma4_text", {**EQUAL, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma4_text-experts": Case("gemma4_text", EXPERTS),
    "gemma4_unified_text": Case("gemma4_unified_text", UNIFIED),
}
WITH_IMAGES = {
    "gemma4": Case(
        "gemma4", {"text_config": SHARED, "vision_config": VISION}, _as_published, divides_among_stages=False
    ),
    "gemma4_unified": Case(
        "gemma4_unified", {"text_config": UNIFIED, "vision_config": {"mm_embed_dim": 48, "mm_posemb_size": 16}}
    ),
}
