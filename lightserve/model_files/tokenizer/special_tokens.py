"""The tokens with a role (bos, eos, unk, pad) for chat templates and encoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from lightserve.model_files.folder import read_json_if_exists


class SpecialTokens(NamedTuple):
    bos: str | None = None
    eos: str | None = None
    unk: str | None = None
    pad: str | None = None
    mask: str | None = None


def special_token_texts(folder: Path) -> SpecialTokens:
    """As the files of a Hugging Face folder name them."""
    config = read_json_if_exists(folder / "special_tokens_map.json")
    config |= read_json_if_exists(folder / "tokenizer_config.json")
    return SpecialTokens(*(_text_of(config.get(f"{role}_token")) for role in SpecialTokens._fields))


def _text_of(token: Any) -> str | None:
    """A token is a string, or an object with the fields of an added token."""
    if isinstance(token, dict):
        return str(token["content"])
    return None if token is None else str(token)


def set_surrounding_tokens(backend: tokenizers.Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Make ``encode(add_special_tokens=True)`` add tokens before and after the text."""
    single = [*before, "$A", *after]
    pair = [*single, *(piece.replace("$A", "$B:1") for piece in single)] if before or after else ["$A", "$B"]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
