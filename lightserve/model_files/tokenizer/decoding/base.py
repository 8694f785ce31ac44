"""The interfaces of all decoders, and the tables that the streams of one tokenizer share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Sequence, Set as AbstractSet
from typing import Protocol, TypeVar

REPLACEMENT = "\ufffd"  # written for bytes that are not (yet) a character

# the tokens that the tokenizers library reads as a byte: u8::from_str_radix allows a plus sign
_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

T = TypeVar("T")


class Vocabulary(Protocol):
    """The part of a tokenizer that a decoder uses."""

    @property
    def special_tokens(self) -> AbstractSet[str]: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def decoder_json(self) -> str | None:
        """The field ``decoder`` of tokenizer.json."""


class DecodeStream(Protocol):
    """The text of one sequence while its ids arrive. The pieces add up exactly to the text of all ids.

    A piece is returned as soon as no further id can change it. It never ends inside a character.

    Where bytes are tokens, those that are no characters become replacement characters, as in SentencePiece. The
    tokenizers library would also replace the characters around them, so text could not be returned before its end.
    """

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The text that is still held back, at the end."""


class EmptyDecodeStream:
    """For a model without a tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Decoder(ABC):
    """Ids to text for one tokenizer. Its tables fill on demand: a large vocabulary costs nothing at the start."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @abstractmethod
    def stream(self, skip_special_tokens: bool, continues_text: bool = False) -> DecodeStream:
        """``continues_text``: a space at the start is part of the text, even if the tokenizer adds one to texts."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token, special or not, adds in the middle of a text. They may be part of a character."""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def _tables(self, piece_of: Callable[[str], T]) -> dict[bool, Table[T]]:
        """One table for each value of skip_special_tokens."""
        return {skip: Table(self._vocabulary, skip, piece_of) for skip in (False, True)}


class Table(dict[int, T | None]):
    """Maps an id to what its token adds; None for an id that the tokenizers library skips before it decodes."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, piece_of: Callable[[str], T]) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_tokens if skip_special_tokens else frozenset()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> T | None:
        token = self._vocabulary.id_to_token(token_id)
        # by its text, like the tokenizers library: another id with the same text is skipped too
        piece = None if token is None or token in self._skipped else self._piece_of(token)
        self[token_id] = piece
        return piece


def decode_utf8(data: bytes, errors: str) -> tuple[str, bytes]:
    """The text of ``data``, and the bytes of an incomplete character at its end."""
    text, n_used = utf_8_decode(data, errors, False)
    tail = data[n_used:]
    if len(tail) == 2 and b"\xed\xa0" <= tail < b"\xee":  # a surrogate, which Python takes for an incomplete character
        text, tail = text + tail.decode(errors=errors), b""
    return text, tail


def decode_raw_bytes(data: bytes) -> tuple[str, bytes]:
    """The same, with a replacement character for each byte that belongs to no character."""
    text = ""
    while True:
        try:
            rest, tail = decode_utf8(data, "strict")
        except UnicodeDecodeError as error:
            text += data[: error.start].decode() + REPLACEMENT * (error.end - error.start)
            data = data[error.end :]
        else:
            return text + rest, tail


def raw_byte(token: str) -> int | None:
    """The byte of a token such as ``<0x0A>``."""
    match = _RAW_BYTE.fullmatch(token)
    return None if match is None else int(match[1], 16)
