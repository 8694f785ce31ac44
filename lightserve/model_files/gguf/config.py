"""A GGUF file's metadata, translated to a transformers ``config.json``."""

from __future__ import annotations

from typing import Any

from lightserve.model_files.gguf.architectures import architecture_of
from lightserve.model_files.gguf.architectures.encoders import gguf_pooling
from lightserve.model_files.gguf.fields import check_options, shape_fields, unsupported
from lightserve.model_files.gguf.header import GgufHeader

# general.sampling: the name in generation_config.json
SAMPLING_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    architecture = architecture_of(header)
    if header.metadata.get(f"{header.architecture}.expert_count", 0) and not architecture.has_experts:
        raise unsupported(header, f"{architecture.model_type} models with experts are not supported")
    check_options(header, architecture.options)
    return {
        **shape_fields(header),
        **architecture.config_fields(header),
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "gguf_pooling": gguf_pooling(header),
    }


def chat_templates_from_gguf(header: GgufHeader) -> dict[str, str]:
    """By name: ``tokenizer.chat_template`` is the default one, ``tokenizer.chat_template.NAME`` are the others."""
    key = "tokenizer.chat_template"
    texts = {name: value for name, value in header.metadata.items() if name == key or name.startswith(f"{key}.")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise unsupported(header, f"metadata {name} is not a string; download it again")
    return {name.removeprefix(key).removeprefix(".") or "default": text for name, text in texts.items()}


def generation_config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    given = {name: header.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING_NAMES.items()}
    return {name: _as_written(value) for name, value in given.items() if value is not None}


def _as_written(value: Any) -> Any:
    """GGUF stores float32: 0.7 is read as 0.699999988."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
