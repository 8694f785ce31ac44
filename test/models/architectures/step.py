"""Step 3.5 and 3.7. Limits are small, so that many numbers reach them. The oracle is transformers' Step 3.7."""

from __future__ import annotations

from test.models.architectures.case import SMALL, Case, Json, Tensors

WINDOW = 24
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
TEXT = {
    **SMALL,
    "num_attention_heads": 4,
    "num_sliding_attention_heads": 6,
    "head_dim": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "sliding_window": WINDOW,
    "n_routed_experts": 8,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 28,
    "share_expert_dim": 28,
    "moe_router_scaling_factor": 1.5,
    "swiglu_limits": [0.0, 0.3, 0.25],
    "swiglu_limits_shared": [0.5, 0.3, 0.4],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}


def _published(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """Step 3.5 as on the hub: other names, values of all layers in lists, and three layers more for drafts."""
    text = config_json["text_config"]
    kinds, ropes = text.pop("layer_types"), text.pop("rope_parameters")
    listed = {name: [ropes[kind][name] for kind in kinds] for name in ("rope_theta", "partial_rotary_factor")}
    scaling = {name: value for name, value in ropes["full_attention"].items() if name not in listed}
    for name in ("num_sliding_attention_heads", "per_layer_config", "num_nextn_predict_layers"):
        text.pop(name, None)
    experts = [str(layer) for layer, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    return {
        **text,
        "model_type": "step3p5",
        "num_attention_groups": text.pop("num_key_value_heads"),
        "moe_num_experts": text.pop("n_routed_experts"),
        "moe_top_k": text.pop("num_experts_per_tok"),
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
        "layer_types": kinds + ["sliding_attention"] * 3,
        "rope_theta": listed["rope_theta"] + [1e4] * 3,
        "partial_rotary_factors": listed["partial_rotary_factor"] + [1.0] * 3,
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "moe_layers_enum": ",".join(experts),
        "num_nextn_predict_layers": 3,
        "use_head_wise_attn_gate": True,
        "moe_router_activation": "sigmoid",
    }, {name: tensor for name, tensor in tensors.items() if not name.startswith("v")}  # of the vision part


CASES = {
    "step3p5": Case("step3p7", {"text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False}, _published)
}
WITH_IMAGES = {
    "step3p7": Case(
        "step3p7",
        {
            "text_config": {
                **TEXT,
                "num_experts_per_tok": 8,
                "share_expert_dim": 40,
                "swiglu_limits": [0, None, 0.2],
                "swiglu_limits_shared": None,
            },
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
    )
}
