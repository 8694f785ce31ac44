"""The tokens with a role (bos, eos, unk, pad) for chat templates and encoding."""

from __future__ import annotations

from typing import NamedTuple

import tokenizers
from tokenizers import processors


class SpecialTokens(NamedTuple):
    bos: str | None = None
    eos: str | None = None
    unk: str | None = None
    pad: str | None = None


def set_surrounding_tokens(backend: tokenizers.Tokenizer, first: str | None, last: str | None) -> None:
    """Make ``encode(add_special_tokens=True)`` add ``first`` before and ``last`` after the text."""
    ends = [token for token in (first, last) if token is not None]
    if not ends:
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        return
    around = [first or "", "$A", last or ""]
    single = [piece for piece in around if piece]
    pair = [*single, *(piece.replace("$A", "$B:1") for piece in single)]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
