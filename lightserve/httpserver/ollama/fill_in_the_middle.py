"""The prompt for a text between a prefix and a suffix, for models that were trained to fill in the middle."""

from __future__ import annotations

from typing import NamedTuple

from lightserve.errors import InvalidRequestError
from lightserve.model_files.tokenizer.tokenizer import Tokenizer


class FillTokens(NamedTuple):
    before_prefix: str
    before_suffix: str
    before_middle: str


KNOWN = (
    FillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    FillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    # DeepSeek-Coder
    FillTokens("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


def fill_tokens(tokenizer: Tokenizer) -> FillTokens | None:
    """The tokens of the model; None: it has none."""
    return next((tokens for tokens in KNOWN if all(tokenizer.token_to_id(token) is not None for token in tokens)), None)


def fill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    tokens = fill_tokens(tokenizer)
    if tokens is None:
        message = "suffix: the model does not support insert: it has no tokens for the middle of a text"
        raise InvalidRequestError(message, "suffix")
    return f"{tokens.before_prefix}{prefix}{tokens.before_suffix}{suffix}{tokens.before_middle}"
