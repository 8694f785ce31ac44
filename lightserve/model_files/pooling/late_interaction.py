"""Late interaction, as in ColBERT: a vector for each token of a text.

The score of a query and a document is the sum, over the query's vectors, of the largest product with one of the
document's. PyLate writes how texts are encoded to ``config_sentence_transformers.json``, and Stanford's ColBERT to
``artifact.metadata``.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.errors import ModelFilesError
from lightserve.model_files.folder import read_json_if_exists

STANFORD = "HF_ColBERT"  # its class in config.json
METADATA = "artifact.metadata"
DEFAULT_SIZE = 128  # of Stanford's vectors
MAX_LENGTH = 2**20


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """The defaults are those of PyLate. Without prefixes and expansion, any encoder gives vectors of tokens."""

    query_prefix: str = "[Q] "  # a token that follows the first one of every query; "": none
    document_prefix: str = "[D] "
    query_length: int = 32  # tokens to which a shorter query is expanded by mask tokens
    document_length: int = 180
    expands_queries: bool = True
    sees_expansion: bool = False  # otherwise mask tokens see the query, and no token sees them
    skipped: tuple[str, ...] = tuple(string.punctuation)  # tokens of documents that have no vector


PLAIN = LateInteraction("", "", expands_queries=False, skipped=())


def read_pylate(path: Path, config: Mapping[str, Any]) -> LateInteraction:
    """``config``: of config_sentence_transformers.json, which is ``path``."""
    fields = _Fields(path, config)
    default = LateInteraction()
    skipped = config.get("skiplist_words")
    if skipped is None:
        skipped = default.skipped
    if not isinstance(skipped, list | tuple) or not all(isinstance(word, str) for word in skipped):
        raise ModelFilesError(f"{path}: skiplist_words is not a list of texts; correct it")
    return LateInteraction(
        fields.text("query_prefix", default.query_prefix),
        fields.text("document_prefix", default.document_prefix),
        fields.length("query_length", default.query_length),
        fields.length("document_length", default.document_length),
        fields.flag("do_query_expansion", True),
        fields.flag("attend_to_expansion_tokens", False),
        tuple(skipped),
    )


def read_stanford(folder: Path | None) -> tuple[LateInteraction, int]:
    """And the size of a vector."""
    path = Path(METADATA) if folder is None else folder / METADATA
    fields = _Fields(path, read_json_if_exists(path))
    late = LateInteraction(
        fields.text("query_token_id", "[unused0]"),
        fields.text("doc_token_id", "[unused1]"),
        fields.length("query_maxlen", 32),
        fields.length("doc_maxlen", 220),
        sees_expansion=fields.flag("attend_to_mask_tokens", False),
        skipped=tuple(string.punctuation) if fields.flag("mask_punctuation", True) else (),
    )
    return late, fields.length("dim", DEFAULT_SIZE)


class _Fields:
    """Values of a file; null means the default."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return default if value is None else value
        raise self._error(name, "a text")

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise self._error(name, "true or false")

    def length(self, name: str, default: int) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_LENGTH:
            return value
        raise self._error(name, "a positive integer")

    def _error(self, name: str, wanted: str) -> ModelFilesError:
        value = str(self._values[name])[:100]
        return ModelFilesError(f"{self._path}: {name} is {value!r}, wanted {wanted}; correct it")
