"""The files of a model: config, tokenizer, chat template, headers of weight files. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightserve.model_files.source import ModelSource, resolve

if TYPE_CHECKING:
    from lightserve.model_files.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ModelSource", "Tokenizer", "load_tokenizer", "resolve"]


def __getattr__(name: str) -> Any:
    """Import on first use: tokenizers need Jinja for chats, which the router and the workers must not load."""
    if name not in __all__:
        raise AttributeError(f"module 'lightserve.model_files' has no attribute {name!r}")
    from lightserve.model_files.tokenizer import tokenizer

    return getattr(tokenizer, name)
