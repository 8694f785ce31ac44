"""Token ids to text. The implementation depends on the tokenizer's own decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lightserve.model_files.tokenizer.decoding.base import Decoder, DecodeStream, EmptyDecodeStream, Vocabulary
from lightserve.model_files.tokenizer.decoding.byte_level import ByteLevelDecoder
from lightserve.model_files.tokenizer.decoding.sentencepiece import Scheme, SentencePieceDecoder
from lightserve.model_files.tokenizer.decoding.window import WindowDecoder

__all__ = ["DecodeStream", "Decoder", "EmptyDecodeStream", "make_decoder"]


def make_decoder(vocabulary: Vocabulary) -> Decoder:
    """A table lookup if each token has a fixed text, otherwise the tokenizer itself over a window of tokens."""
    description = vocabulary.decoder_json()
    steps = [] if description is None else list(_steps(json.loads(description)))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoder(vocabulary)
    scheme = Scheme.of(steps)
    return WindowDecoder(vocabulary) if scheme is None else SentencePieceDecoder(vocabulary, scheme)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder, with nested sequences flattened."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)
