"""Any other decoder: the newest ids are decoded again with every id, and what their text has grown by is the news.

Exact for a decoder whose tokens do not look further back than ``CONTEXT`` tokens (and at whether they are the first),
which holds for all that tokenizers has: WordPiece, BPEDecoder, CTC, none at all, and sequences of them.
"""

from __future__ import annotations

from lightserve.model_files.decoding.base import REPLACEMENT, Decoder, Table, TextStream, Vocabulary, raw_byte

CONTEXT = 8  # tokens; one would do for the decoders there are


class WindowDecoder(Decoder):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._tokens = self._tables(str)

    def stream(self, skip_special_tokens: bool) -> TextStream:
        return WindowStream(self._vocabulary, self._tokens[skip_special_tokens])

    def token_bytes(self, token_id: int) -> bytes:
        alone = self._vocabulary.decode([token_id], skip_special_tokens=False)
        twice = self._vocabulary.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(alone) :] or alone).encode()


class WindowStream:
    __slots__ = ("_ids", "_n_given", "_tokens", "_vocabulary")
    ahead = ""

    def __init__(self, vocabulary: Vocabulary, tokens: Table[str]) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._ids: list[int] = []  # the window; only ids that are decoded, so that its first one is a first one
        self._n_given = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        token = self._tokens[token_id]
        if token is None:
            return ""
        self._ids.append(token_id)
        if raw_byte(token) is not None:  # only the end of a run of bytes decides what it is
            return ""
        text = self._text()
        news = self._give(text, len(text) - text.endswith(REPLACEMENT))  # which may become a character
        if len(self._ids) >= 2 * CONTEXT:
            self._shorten(n_held=len(text) - self._n_given)
        return news

    def flush(self) -> str:
        text = self._text() if self._ids else ""
        return self._give(text, len(text))

    def _text(self) -> str:
        return self._vocabulary.decode(self._ids, skip_special_tokens=False)

    def _give(self, text: str, end: int) -> str:
        news = text[self._n_given : end]
        self._n_given += len(news)
        return news

    def _shorten(self, n_held: int) -> None:
        whole = self._ids
        self._ids = whole[-CONTEXT:]
        n_given = len(self._text()) - n_held
        if n_given <= 0:  # a beginning without text might be treated as the beginning of all
            self._ids = whole
            return
        self._n_given = n_given
