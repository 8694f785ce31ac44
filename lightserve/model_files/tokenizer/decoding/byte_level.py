"""Byte-level vocabularies (GPT-2 and most later ones): a token is bytes, and all bytes together are UTF-8."""

from __future__ import annotations

from lightserve.model_files.tokenizer.decoding.base import Decoder, DecodeStream, Table, Vocabulary, decode_utf8

Piece = str | bytes  # bytes if they are not valid UTF-8 by themselves


class ByteLevelDecoder(Decoder):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._pieces = self._tables(_piece)

    def stream(self, skip_special_tokens: bool, continues_text: bool = False) -> DecodeStream:
        return ByteLevelStream(self._pieces[skip_special_tokens])

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[False][token_id] or b""
        return piece if isinstance(piece, bytes) else piece.encode()


class ByteLevelStream:
    """Python replaces invalid bytes like Rust: one replacement for each longest start of a character."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, pieces: Table[Piece]) -> None:
        self._pieces = pieces
        self._held = b""  # an incomplete character, at most 3 bytes

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if type(piece) is str and not self._held:  # nearly always
            return piece
        if not piece:
            return ""
        data = piece.encode() if isinstance(piece, str) else piece
        text, self._held = decode_utf8(self._held + data, "replace")
        return text

    def flush(self) -> str:
        text = self._held.decode(errors="replace")
        self._held = b""
        return text


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is its own character; the others map to U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _piece(token: str) -> Piece:
    data = _bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:  # a character outside the alphabet, as in added tokens: the whole token is plain text
        return token.encode()
