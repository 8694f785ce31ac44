"""LightServe serves large language models. ``from lightserve import LLM`` runs one in this process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightserve.messages.params import GenerationParams
    from lightserve.offline.async_llm import AsyncLLM
    from lightserve.offline.llm import LLM

__all__ = ["LLM", "AsyncLLM", "GenerationParams"]
__version__ = "0.1.0"

_MODULES = {
    "LLM": "lightserve.offline.llm",
    "AsyncLLM": "lightserve.offline.async_llm",
    "GenerationParams": "lightserve.messages.params",
}


def __getattr__(name: str) -> Any:
    """Import on first use: LLM needs torch, which most processes must not load."""
    if name not in _MODULES:
        raise AttributeError(f"module 'lightserve' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
