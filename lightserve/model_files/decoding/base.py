"""What every way to decode has in common: streams of text, and the tables that the streams of a tokenizer share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Sequence, Set as AbstractSet
from typing import Protocol, TypeVar

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character

# what tokenizers takes for a byte: u8::from_str_radix allows a plus sign
_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

T = TypeVar("T")


class Vocabulary(Protocol):
    """What a decoder wants to know of a tokenizer."""

    @property
    def special_tokens(self) -> AbstractSet[str]: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def decoder_json(self) -> str | None:
        """The field ``decoder`` of tokenizer.json."""


class TextStream(Protocol):
    """The text of one sequence as its ids come: the pieces add up to the text of all ids, to the character.

    A piece is given out as soon as no further id can change it, and never half a character.
    """

    @property
    def ahead(self) -> str:
        """What the last id adds to the text if the sequence ends here, where a further id may still take it back."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """What is still held back, at the end."""


class NoTextStream:
    """Of a model without a tokenizer."""

    ahead = ""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Decoder(ABC):
    """Ids to text for one tokenizer. Its tables fill as ids are met: a large vocabulary costs nothing at the start."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @abstractmethod
    def stream(self, skip_special_tokens: bool) -> TextStream: ...

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds in the middle of a text, which may be part of a character; special tokens too."""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def _tables(self, piece_of: Callable[[str], T]) -> dict[bool, Table[T]]:
        """By skip_special_tokens."""
        return {skip: Table(self._vocabulary, skip, piece_of) for skip in (False, True)}


class Table(dict[int, T | None]):
    """Id to what its token adds; None for an id that tokenizers leaves out before it decodes."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, piece_of: Callable[[str], T]) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_tokens if skip_special_tokens else frozenset()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> T | None:
        token = self._vocabulary.id_to_token(token_id)
        # by its text, as tokenizers does: another id with the same text is skipped as well
        piece = None if token is None or token in self._skipped else self._piece_of(token)
        self[token_id] = piece
        return piece


def decode_utf8(data: bytes, errors: str) -> tuple[str, bytes]:
    """The text of ``data``, and the beginning of a character that it ends with."""
    text, n_used = utf_8_decode(data, errors, False)
    tail = data[n_used:]
    if len(tail) == 2 and b"\xed\xa0" <= tail < b"\xee":  # a surrogate, for which Python waits in vain
        text, tail = text + tail.decode(errors=errors), b""
    return text, tail


def raw_byte(token: str) -> int | None:
    """The byte that a token such as ``<0x0A>`` stands for."""
    match = _RAW_BYTE.fullmatch(token)
    return None if match is None else int(match[1], 16)
