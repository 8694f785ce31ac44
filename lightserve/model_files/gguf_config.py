"""A GGUF file's metadata, translated to a transformers ``config.json``."""

from __future__ import annotations

from typing import Any

from lightserve.model_files.gguf_architectures import architecture_of
from lightserve.model_files.gguf_fields import shape_fields, unsupported
from lightserve.model_files.gguf_header import GgufHeader

CONTROL = 3  # a token type: control tokens are never part of plain text


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


def eos_ids_from_gguf(header: GgufHeader) -> tuple[int, ...]:
    """Every id that ends a turn: eos, eot, eom, and ``<|im_end|>`` if the chat template ends turns with it."""
    named = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {token_id for token_id in named if token_id is not None}
    tokens, types = header.metadata.get("tokenizer.ggml.tokens", []), header.metadata.get("tokenizer.ggml.token_type")
    turn_end = "<|im_end|>"
    if types and turn_end in header.metadata.get("tokenizer.chat_template", "") and turn_end in tokens:
        token_id = tokens.index(turn_end)
        if types[token_id] == CONTROL:
            ids.add(token_id)
    return tuple(sorted(ids))
