"""SentencePiece vocabularies: a token is text with ``▁`` for a space, or a single byte such as ``<0x0A>``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightserve.model_files.tokenizer.decoding.base import (
    REPLACEMENT,
    Decoder,
    DecodeStream,
    Table,
    Vocabulary,
    decode_raw_bytes,
    raw_byte,
)

Piece = str | int  # an int is a byte


@dataclass(frozen=True, slots=True)
class Scheme:
    """The steps of a SentencePiece decoder, in order."""

    replaced: tuple[tuple[str, str], ...] = ()  # in every token
    dropped_at_first: str = ""  # in the first token, instead of ``replaced``
    has_raw_bytes: bool = False
    stripped: str = ""  # a character
    n_stripped: int = 0  # how many of them are removed from the start of the text

    @staticmethod
    def of(steps: Sequence[dict[str, Any]]) -> Scheme | None:
        """None if the steps are different or in another order."""
        match [step["type"] for step in steps]:
            case ["Metaspace"] | ["Metaspace", "Fuse"]:
                return Scheme._of_metaspace(steps[0])
            case [*head, "Fuse", "Strip"] if steps[-1]["stop"] == 0:
                return Scheme._of_replacing(steps[: len(head)], steps[-1]["content"], steps[-1]["start"])
            case [*head, "Fuse"]:
                return Scheme._of_replacing(steps[: len(head)])
            case [_, *_]:
                return Scheme._of_replacing(steps)
        return None

    @staticmethod
    def _of_metaspace(step: dict[str, Any]) -> Scheme:
        space = step["replacement"]
        return Scheme(((space, " "),), dropped_at_first="" if step["prepend_scheme"] == "never" else space)

    @staticmethod
    def _of_replacing(steps: Sequence[dict[str, Any]], stripped: str = "", n_stripped: int = 0) -> Scheme | None:
        has_raw_bytes = bool(steps) and steps[-1]["type"] == "ByteFallback"
        replaces = steps[:-1] if has_raw_bytes else steps
        if not all(step["type"] == "Replace" and step["pattern"].get("String") for step in replaces):
            return None
        replaced = tuple((step["pattern"]["String"], step["content"]) for step in replaces)
        return Scheme(replaced, has_raw_bytes=has_raw_bytes, stripped=stripped, n_stripped=n_stripped)

    def piece(self, token: str, is_first: bool) -> Piece:
        if is_first and self.dropped_at_first:
            return token.replace(self.dropped_at_first, "")
        for old, new in self.replaced:
            token = token.replace(old, new)
        byte = raw_byte(token) if self.has_raw_bytes else None
        return token if byte is None else byte


class SentencePieceDecoder(Decoder):
    def __init__(self, vocabulary: Vocabulary, scheme: Scheme) -> None:
        super().__init__(vocabulary)
        self._scheme = scheme
        self._pieces = self._tables(partial(scheme.piece, is_first=False))
        self._firsts = self._tables(partial(scheme.piece, is_first=True)) if scheme.dropped_at_first else self._pieces

    def stream(self, skip_special_tokens: bool, continues_text: bool = False) -> DecodeStream:
        pieces = self._pieces[skip_special_tokens]
        if continues_text:
            return SentencePieceStream(pieces, pieces, replace(self._scheme, n_stripped=0))
        return SentencePieceStream(self._firsts[skip_special_tokens], pieces, self._scheme)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[False][token_id]
        return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode()


class SentencePieceStream:
    __slots__ = ("_is_plain", "_n_to_strip", "_pieces", "_rest", "_stripped", "_tail")

    def __init__(self, firsts: Table[Piece], rest: Table[Piece], scheme: Scheme) -> None:
        self._pieces = firsts  # until the first token arrives
        self._rest = rest
        self._tail = b""  # an incomplete character
        self._stripped = scheme.stripped
        self._n_to_strip = scheme.n_stripped  # not 0 while all text so far was stripped
        self._is_plain = False  # neither at the start nor in a character: pieces are returned unchanged

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._is_plain and type(piece) is str:  # nearly always
            return piece
        if piece is None:
            return ""
        self._pieces = self._rest
        text = self._strip(self._push_byte(piece) if isinstance(piece, int) else self._end_character() + piece)
        self._is_plain = not self._n_to_strip and not self._tail
        return text

    def flush(self) -> str:
        return self._strip(self._end_character())

    def _push_byte(self, byte: int) -> str:
        text, self._tail = decode_raw_bytes(self._tail + bytes((byte,)))
        return text

    def _end_character(self) -> str:
        """The bytes of a character that will not be completed."""
        text, self._tail = REPLACEMENT * len(self._tail), b""
        return text

    def _strip(self, text: str) -> str:
        if not self._n_to_strip or not text:
            return text
        n_leading = len(text) - len(text.lstrip(self._stripped))
        n_cut = min(n_leading, self._n_to_strip)
        self._n_to_strip = self._n_to_strip - n_cut if n_cut == len(text) else 0
        return text[n_cut:]
