"""Language models in checkpoints that read images too. The oracle is transformers' class for the whole model."""

from __future__ import annotations

import re

from test.models.architectures import gemma4, llama4, step
from test.models.architectures.case import SMALL, Case, Json, Tensors
from test.models.architectures.hybrid import CONV
from test.models.architectures.latent import GROUPS, LATENT, QUERY_SCALE

UNTIED = {"tie_word_embeddings": False}
THREE_AXES = {"rope_parameters": {"type": "mrope", "mrope_section": [1, 2, 1], "rope_theta": 1e6}}
INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_theta": 1e6}
QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 1}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "out_hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
SQUARE_VISION = {**PIXTRAL, "model_type": "siglip_vision_model", "image_size": 32, "vision_use_head": False}
INTERN_VISION = {**PIXTRAL, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
# transformers 5.22 leaves out the scale in these classes
COHERE = {"model_type": "cohere2", "num_hidden_layers": 5, "sliding_window": 24, "logit_scale": 1.0}
SIGLIP = {**PIXTRAL, "image_size": 32, "patch_size": 8}
del SIGLIP["model_type"]
KIMI_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GLM_VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 16}
GLM_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5, "rope_theta": 1e4}
GLM_ROPE_WIDE = {**GLM_ROPE, "mrope_section": [2, 1, 1]}
GLM_EXPERTS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "routed_scaling_factor": 1.5,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
EXPERTS = {"head_dim": 16, "num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 28}


def _without_text_config(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As Qwen2-VL was published: the fields of the language model among those of the whole model."""
    text = {
        key: value
        for key, value in config_json.pop("text_config").items()
        if key not in ("model_type", "rope_parameters")
    }
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}, "rope_theta": 1e6}
    return {**text, **config_json, **rope}, tensors


def _as_saved_today(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """With the names that the model has in memory."""
    names = {name: re.sub(r"^(language_model\.)?model\.", "model.language_model.", name) for name in tensors}
    return config_json, {names[name].removeprefix("language_model."): tensor for name, tensor in tensors.items()}


def _transposed_experts(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As Qwen3-VL was published."""
    return config_json, {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }


def _as_kimi(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As published: transformers 5.22 saves the layers of the language model under another name."""
    return config_json, {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in tensors.items()}


def _as_kimi_k2(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    text = {**config_json["text_config"], "model_type": "kimi_k2"}
    return _as_kimi({**config_json, "text_config": text}, tensors)


def _once(config_json: Json, tensors: Tensors) -> tuple[Json, Tensors]:
    """As Qwen2-Audio was published: transformers 5.22 saves the language model with ``model.`` twice."""
    return config_json, {name.replace("model.model.", "model."): tensor for name, tensor in tensors.items()}


def _case(model_type: str, text: Json, vision: Json, **fields: object) -> tuple[str, Json]:
    return model_type, {"text_config": {**SMALL, **text}, "vision_config": vision, **UNTIED, **fields}


HEARS = {
    "text_config": {**SMALL, "model_type": "qwen2"},
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
    },
    **UNTIED,
}
CASES = {
    **gemma4.WITH_IMAGES,
    **llama4.WITH_IMAGES,
    **step.WITH_IMAGES,
    "qwen2_vl": Case(*_case("qwen2_vl", THREE_AXES, QWEN2_VISION), _without_text_config),
    "qwen2_audio": Case("qwen2_audio", HEARS, _once),
    "qwen2_5_vl": Case(*_case("qwen2_5_vl", THREE_AXES, QWEN_VISION)),
    "qwen2_5_vl-today": Case(*_case("qwen2_5_vl", THREE_AXES, QWEN_VISION, tie_word_embeddings=True), _as_saved_today),
    "qwen3_vl": Case(*_case("qwen3_vl", {"head_dim": 16, "rope_parameters": INTERLEAVED}, QWEN_VISION)),
    "qwen3_vl_moe": Case(*_case("qwen3_vl_moe", EXPERTS, QWEN_VISION), _transposed_experts),
    "qwen3_vl_moe-stacked": Case(*_case("qwen3_vl_moe", {**EXPERTS, "mlp_only_layers": [1]}, QWEN_VISION)),
    "glm4v": Case(*_case("glm4v", {"rope_parameters": GLM_ROPE}, GLM_VISION)),
    "glm4v_moe": Case(
        *_case("glm4v_moe", {**GLM_EXPERTS, "head_dim": 16, "rope_parameters": GLM_ROPE_WIDE}, GLM_VISION)
    ),
    "glm46v": Case(
        *_case(
            "glm46v",
            {"model_type": "glm4v_text", "rope_parameters": GLM_ROPE},
            {**GLM_VISION, "model_type": "glm4v_vision"},
        )
    ),
    "lfm2_vl": Case(
        *_case("lfm2_vl", {**CONV, "model_type": "lfm2"}, {**SIGLIP, "model_type": "siglip2_vision_model"})
    ),
    "smolvlm": Case(*_case("smolvlm", {"model_type": "llama"}, SIGLIP)),
    "idefics3": Case(*_case("idefics3", {"model_type": "llama"}, SIGLIP)),
    "mistral3": Case(*_case("mistral3", {"model_type": "mistral", "sliding_window": 24}, PIXTRAL), _as_saved_today),
    "mistral3-ministral3": Case(
        *_case("mistral3", {"model_type": "ministral3", "head_dim": 16, "rope_parameters": QUERY_SCALE}, PIXTRAL)
    ),
    "mistral3-mistral4": Case(
        *_case("mistral3", {**LATENT, "model_type": "mistral4", "rope_parameters": QUERY_SCALE}, PIXTRAL)
    ),
    "llama-llava": Case(*_case("llava", {"model_type": "llama"}, SQUARE_VISION)),
    "mistral-llava_next": Case(*_case("llava_next", {"model_type": "mistral", "sliding_window": None}, SQUARE_VISION)),
    "qwen2-llava_onevision": Case(*_case("llava_onevision", {"model_type": "qwen2"}, SQUARE_VISION), _as_saved_today),
    "aya_vision": Case(*_case("aya_vision", COHERE, SQUARE_VISION)),
    "cohere2_vision": Case(*_case("cohere2_vision", COHERE, SQUARE_VISION, alignment_intermediate_size=16)),
    "qwen2-internvl": Case(*_case("internvl", {"model_type": "qwen2"}, INTERN_VISION)),
    "gemma-paligemma": Case(
        *_case(
            "paligemma",
            {"model_type": "gemma", "head_dim": 16, "use_bidirectional_attention": False},
            SQUARE_VISION,
            hidden_size=SMALL["hidden_size"],
        )
    ),
    "kimi_k25": Case(*_case("kimi_k25", {**LATENT, **GROUPS, "model_type": "deepseek_v3"}, KIMI_VISION), _as_kimi),
    "kimi_k25-k2": Case(
        *_case("kimi_k25", {**LATENT, **ONE_GROUP, "model_type": "deepseek_v3"}, KIMI_VISION), _as_kimi_k2
    ),
}
