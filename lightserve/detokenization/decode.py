"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Pieces of text whose concatenation is the text of all ids.

    Decoding is not a sum over tokens (a leading space, characters of several tokens), so a window of ids is decoded
    twice, with and without its newest ones, and the difference is the news.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0  # first id of the window
        self._told = 0  # ids before this are in the text given out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._news()
        if not text or text.endswith(REPLACEMENT):  # wait for the rest of the character
            return ""
        self._window, self._told = self._told, len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back, at the end."""
        text = self._news()
        self._window = self._told = len(self._ids)
        return text

    def _news(self) -> str:
        known = self._decode(self._ids[self._window : self._told])
        return self._decode(self._ids[self._window :])[len(known) :]
