"""Any other decoder: decodes the newest ids again with every id, and returns the text that was added.

This is exact if a token depends on at most ``CONTEXT`` tokens before it (and on whether it is the first), which holds
for every decoder of the tokenizers library: WordPiece, BPEDecoder, CTC, none at all, and sequences of them.
"""

from __future__ import annotations

from lightserve.model_files.tokenizer.decoding.base import (
    REPLACEMENT,
    Decoder,
    DecodeStream,
    Table,
    Vocabulary,
    raw_byte,
)

CONTEXT = 8  # tokens; one is enough for the existing decoders


class WindowDecoder(Decoder):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._tokens = self._tables(str)

    def stream(self, skip_special_tokens: bool, continues_text: bool = False) -> DecodeStream:
        """Which space a first token loses is not known, so ``continues_text`` has no effect."""
        return WindowStream(self._vocabulary, self._tokens[skip_special_tokens])

    def token_bytes(self, token_id: int) -> bytes:
        alone = self._vocabulary.decode([token_id], skip_special_tokens=False)
        twice = self._vocabulary.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(alone) :] or alone).encode()


class WindowStream:
    __slots__ = ("_ids", "_n_returned", "_tokens", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, tokens: Table[str]) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._ids: list[int] = []  # the window, without skipped ids: its first id decodes like a first one
        self._n_returned = 0  # characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        token = self._tokens[token_id]
        if token is None:
            return ""
        self._ids.append(token_id)
        if raw_byte(token) is not None:  # only the end of a run of bytes decides whether it is text
            return ""
        text = self._text()
        added = self._take(text, len(text) - text.endswith(REPLACEMENT))  # a replacement may become a character
        if len(self._ids) >= 2 * CONTEXT:
            self._shorten(n_held=len(text) - self._n_returned)
        return added

    def flush(self) -> str:
        text = self._text() if self._ids else ""
        return self._take(text, len(text))

    def _text(self) -> str:
        return self._vocabulary.decode(self._ids, skip_special_tokens=False)

    def _take(self, text: str, end: int) -> str:
        added = text[self._n_returned : end]
        self._n_returned += len(added)
        return added

    def _shorten(self, n_held: int) -> None:
        whole = self._ids
        self._ids = whole[-CONTEXT:]
        n_returned = len(self._text()) - n_held
        if n_returned <= 0:  # a window without text might be treated as the start of the sequence
            self._ids = whole
            return
        self._n_returned = n_returned
