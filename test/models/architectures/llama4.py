"""Llama 4: chunks that end within prompts, layers without positions, an expert by its scaled input."""

from __future__ import annotations

from test.models.architectures.case import SMALL, Case, Json, Tensors

TEXT = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "attention_chunk_size": 24,
    "floor_scale": 16,
    "attn_scale": 0.3,
    "rms_norm_eps": 1e-2,
}
UNBLENDED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "image_size": 28,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def _as_published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """Lists follow from other fields, and 4 means that queries are scaled."""
    for name in ("layer_types", "no_rope_layers", "moe_layers"):
        del config_json[name]
    return {**config_json, "attn_temperature_tuning": 4}, tensors


CASES = {
    "llama4_text": Case("llama4_text", TEXT),
    "llama4_text-published": Case(
        "llama4_text",
        {**TEXT, "interleave_moe_layer_step": 2, "use_qk_norm": False, "no_rope_layer_interval": 3},
        _as_published,
    ),
    "llama4_text-lists": Case(
        "llama4_text",
        {
            **TEXT,
            "no_rope_layers": [0, 1, 0, 1],
            "moe_layers": [1],
            "attn_temperature_tuning": False,
            "attention_chunk_size": 1000,  # no request has so many tokens
        },
    ),
}
WITH_IMAGES = {
    "llama4": Case(
        "llama4",
        {"text_config": {**TEXT, "rope_parameters": UNBLENDED}, "vision_config": VISION, "tie_word_embeddings": False},
    ),
}
