"""Checkpoints that read images too: the config and the tensors of the language model in them, which is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightserve.errors import ModelFilesError

TEXT_CONFIG = "text_config"
# model_type of the whole model: as which model_type its language model is served, if text_config does not say
TEXT_TYPES = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v_moe",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "qwen2_5_vl": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "smolvlm": "llama",
    "step3p7": "step3p5",
}
# model_type of text_config: as which model_type it is served; others are served as what they are
SERVED_AS = {
    **TEXT_TYPES,
    "glm4v_moe_text": "glm4v_moe",
    "glm4v_text": "glm4v",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
PREFIX_MODEL = "paligemma"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# model_type of text_config: what transformers takes for the sizes that it leaves out, as it does in LLaVA's files
TEXT_DEFAULTS = {
    model_type: dict(zip((*_SIZES, "max_position_embeddings"), sizes, strict=True))
    for model_type, sizes in {
        "gemma": (256_000, 3072, 24_576, 28, 16, 8192),
        "gemma2": (256_000, 2304, 9216, 26, 8, 8192),
        "llama": (32_000, 4096, 11_008, 32, 32, 2048),
        "mistral": (32_000, 4096, 14_336, 32, 32, 131_072),
        "qwen2": (151_936, 4096, 22_016, 32, 32, 32_768),
    }.items()
}
# prefixes of the tensors of the other parts, with or without ``model.`` before them
OTHER_PARTS = (
    *("visual.", "vision_tower.", "vision_model.", "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio."),
    *("multi_modal_projector.", "mm_projector.", "vit_large_projector.", "connector.", "image_newline"),
)


def with_text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the fields of the language model beside those of the whole model, which win, except for sizes.

    ``model_type`` is that of the language model, and ``multimodal_type`` that of the whole model.
    """
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_TYPES:
        return dict(hf)
    text = {} if hf.get(TEXT_CONFIG) is None else hf[TEXT_CONFIG]
    if not isinstance(text, dict):
        raise ModelFilesError(f"config.json: {TEXT_CONFIG} is not an object; fetch it again")
    text_type = text.get("model_type") or model_type
    if model_type == PREFIX_MODEL:  # the text sees the prompt, not all of itself
        text = {name: value for name, value in text.items() if name != "use_bidirectional_attention"}
    sizes = {name: text[name] for name in _SIZES if text.get(name) is not None}
    if text:
        text = {**TEXT_DEFAULTS.get(str(text_type), {}), **text}
    whole = {name: value for name, value in hf.items() if value is not None}
    return {
        **text,
        **whole,
        **sizes,
        "model_type": SERVED_AS.get(str(text_type), text_type),
        "multimodal_type": model_type,
    }


def is_of_other_part(name: str) -> bool:
    """Whether a tensor is not of the language model."""
    return name.removeprefix("model.").startswith(OTHER_PARTS)


def text_name(name: str) -> str:
    """The name that a tensor or module of the language model has in a checkpoint of that model alone.

    Files name it ``model.language_model.layers`` as transformers does today, ``model.text_model.layers``,
    ``language_model.model.layers``, or as the model alone. transformers 5 writes Qwen2-Audio's with ``model.`` twice.
    """
    for text_part in ("language_model.", "text_model."):
        if name.startswith(f"model.{text_part}"):
            return name.replace(text_part, "", 1)
    name = name.removeprefix("language_model.")
    return name.removeprefix("model.") if name.startswith("model.model.") else name
