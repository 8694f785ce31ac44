"""A GGUF file's metadata, translated to a transformers ``config.json``."""

from __future__ import annotations

from typing import Any

from lightserve.model_files.gguf_architectures import architecture_of
from lightserve.model_files.gguf_fields import shape_fields, unsupported
from lightserve.model_files.gguf_header import GgufHeader


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    architecture = architecture_of(header)
    if header.metadata.get(f"{header.metadata['general.architecture']}.expert_count", 0):
        raise unsupported(header, "mixtures of experts are not supported")
    return {
        **shape_fields(header),
        **architecture.config_fields(header),
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
    }
