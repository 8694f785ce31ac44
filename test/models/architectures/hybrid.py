"""Models in which some layers have recurrent state instead of attention. Chunks of prompts end anywhere in them."""

from __future__ import annotations

from test.models.architectures.case import SMALL, Case, without
from test.models.architectures.moe import QWEN

# odd sizes, three value heads for each key head, and attention in every third layer
DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 3,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
SHARED = {**QWEN, "shared_expert_intermediate_size": 44}
ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25}

CASES = {
    "qwen3_next": Case("qwen3_next", {**SMALL, **SHARED, **DELTA, "rope_parameters": ROPE}),
    "qwen3_next-dense": Case(
        "qwen3_next",
        {
            **SMALL,
            **SHARED,
            **DELTA,
            "full_attention_interval": 4,  # the default
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        without("layer_types"),
    ),
}
