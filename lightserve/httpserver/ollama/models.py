"""The served model as Ollama describes models, and its names: in any case, with or without the tag ``latest``."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from lightserve.errors import ModelNotFoundError
from lightserve.httpserver.chat.output import output_formats
from lightserve.httpserver.context import PLACEHOLDER_NAMES, ServerContext
from lightserve.httpserver.http.body import JsonObject
from lightserve.httpserver.ollama.fill_in_the_middle import fill_tokens
from lightserve.httpserver.ollama.response import timestamp
from lightserve.model_files.model_summary import UNKNOWN, ModelDetails

NEVER = "2300-01-01T00:00:00Z"  # the model stays loaded

# names in GGUF's metadata: names in config.json
MODEL_INFO = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "embedding_length": ("hidden_size", "n_embed"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "vocab_size": ("vocab_size",),
}
TAG = ":latest"
HUBS = ("hf.co/", "huggingface.co/")  # clients put them before names of the hub


def listed_models(context: ServerContext) -> list[JsonObject]:
    """One entry for each served name."""
    return [{**_entry(context, name), "modified_at": _modified_at(context)} for name in context.model_names]


def running_models(context: ServerContext) -> list[JsonObject]:
    more = {"expires_at": NEVER, "context_length": context.manager.limits.max_req_total_len}
    entry = _entry(context, context.model_name)
    return [{**entry, "size_vram": entry["size"], **more}]


def shown_model(context: ServerContext, name: str) -> JsonObject:
    tokenizer = context.optional_tokenizer
    return {
        "license": "",
        "modelfile": f"FROM {name}\n",
        "parameters": "",
        "template": "" if tokenizer is None else tokenizer.chat_template or "",
        "details": _details(context.details),
        "model_info": _model_info(context),
        "capabilities": _capabilities(context),
        "modified_at": _modified_at(context),
    }


def _entry(context: ServerContext, name: str) -> JsonObject:
    size = 0 if context.details is None else context.details.size_bytes
    digest = hashlib.sha256(f"{context.model_name} {size} {_modified_at(context)}".encode()).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(context.details)}


def _modified_at(context: ServerContext) -> str:
    modified_s = context.created if context.details is None else context.details.modified_s
    return timestamp(datetime.fromtimestamp(modified_s, UTC))


def _details(details: ModelDetails | None) -> JsonObject:
    family = UNKNOWN if details is None else details.architecture
    return {
        "parent_model": "",
        "format": UNKNOWN if details is None else details.file_format,
        "family": family,
        "families": [family],
        "parameter_size": UNKNOWN if details is None else _rounded(details.parameter_count),
        "quantization_level": UNKNOWN if details is None else details.data_type,
    }


def _rounded(count: int | None) -> str:
    if count is None:
        return UNKNOWN
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _model_info(context: ServerContext) -> JsonObject:
    details = context.details
    family = UNKNOWN if details is None else details.architecture
    given: JsonObject = {
        "general.architecture": family,
        "general.basename": context.model_name,
        "general.parameter_count": None if details is None else details.parameter_count,
        f"{family}.context_length": context.manager.limits.max_req_total_len,
    }
    if details is not None:
        given |= {f"{family}.{name}": _first(details, *keys) for name, keys in MODEL_INFO.items()}
    return {name: value for name, value in given.items() if value is not None}


def _first(details: ModelDetails, *keys: str) -> Any:
    return next((details.hf_config[key] for key in keys if details.hf_config.get(key) is not None), None)


def _capabilities(context: ServerContext) -> list[str]:
    formats, tokenizer = output_formats(context), context.optional_tokenizer
    has = {
        "completion": True,
        "insert": tokenizer is not None and fill_tokens(tokenizer) is not None,
        "tools": formats.tools is not None,
        "thinking": formats.reasoning is not None,
        "vision": context.images is not None and "image" in context.images.layout.kinds,
    }
    return [name for name, is_there in has.items() if is_there]


def check_name(context: ServerContext, name: str | None) -> str:
    """The name that a response shows: the one in the request, or the first of the server."""
    if name is None or name == "":
        return context.model_name
    if context.config.use_tgi_api or _is_base_model(context, name):
        return name
    if context.has_adapters:  # the router knows them
        return name
    served = ", ".join(map(repr, context.model_names))
    raise ModelNotFoundError(f"model {name[:100]!r} not found; this server has {served}", "model")


def adapter_model(context: ServerContext, name: str) -> str | None:
    """The model of a chat by this name; None: the base model."""
    if _is_base_model(context, name):
        return None
    return name.removesuffix(TAG) if context.has_adapters else None


def _is_base_model(context: ServerContext, name: str) -> bool:
    return _key(name) in map(_key, (*context.model_names, *PLACEHOLDER_NAMES))


def _key(name: str) -> str:
    name = name.casefold().removesuffix(TAG)
    return next((name.removeprefix(hub) for hub in HUBS if name.startswith(hub)), name)
