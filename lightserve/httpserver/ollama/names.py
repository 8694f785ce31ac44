"""Model names in Ollama's form: in any case, with or without the tag ``latest``."""

from __future__ import annotations

from lightserve.errors import ModelNotFoundError
from lightserve.httpserver.context import PLACEHOLDER_NAMES, ServerContext

TAG = ":latest"


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
    return name.casefold().removesuffix(TAG)
