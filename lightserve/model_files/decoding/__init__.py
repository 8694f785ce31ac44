"""Token ids to text: the way to decode that a tokenizer's own decoder calls for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightserve.model_files.decoding.base import Decoder, NoTextStream, TextStream, Vocabulary
from lightserve.model_files.decoding.byte_level import ByteLevelDecoder
from lightserve.model_files.decoding.sentencepiece import Scheme, SentencePieceDecoder
from lightserve.model_files.decoding.window import WindowDecoder

__all__ = ["Decoder", "NoTextStream", "TextStream", "decoder_of"]


def decoder_of(vocabulary: Vocabulary) -> Decoder:
    """A table where the text of a token is known beforehand, else the tokenizer itself over a window."""
    description = vocabulary.decoder_json()
    steps = [] if description is None else list(_steps(json.loads(description)))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoder(vocabulary)
    scheme = Scheme.of(steps)
    return WindowDecoder(vocabulary) if scheme is None else SentencePieceDecoder(vocabulary, scheme)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder, without the sequences they are put in."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)
