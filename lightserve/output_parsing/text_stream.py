"""Text that arrives in pieces, for parsers that read it as if it were complete.

A parser is a generator over a stream: it yields when it needs more text than has arrived. The result does not depend on
where the text was split, so streamed and complete outputs are parsed alike. Reading takes linear time: a piece is
copied once, also while a mark keeps the text that was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Incremental = Generator[None, None, T]  # yields when it needs more text, returns T
Emit = Callable[[str], None]
IsPlain = Callable[[str], bool]


class StopCharacters(NamedTuple):
    """The characters that end a run of text. For a piece of a few characters a set is twice as fast as a pattern."""

    pattern: re.Pattern[str]
    has_none_in: IsPlain


class TextStream:
    def __init__(self) -> None:
        self.text = ""  # the unread text, and before it text that was read lately
        self.position = 0  # the start of the unread text
        self.is_closed = False
        self._mark: int | None = None
        self._kept: list[str] = []  # what was read since the mark and is no longer in ``text``
        # While the parser only emits text and has read all of it: where a plain piece goes, and whether it is one
        self._emit: Emit | None = None
        self._is_plain: IsPlain = bool

    def feed(self, text: str) -> bool:
        """Add a piece. Return whether the parser must run: a piece that is only emitted does not need it."""
        emit = self._emit
        if emit is not None:
            if self._is_plain(text):
                emit(text)
                return False
            self._emit = None
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.position])
            self._mark = 0
        self.text = self.text[self.position :] + text
        self.position = 0
        return True

    def close(self) -> None:
        """The text is complete."""
        self.is_closed = True

    @property
    def is_at_end(self) -> bool:
        """The text is complete, and all of it was read."""
        return self.is_closed and self.position == len(self.text)

    def wait_for_more(self) -> Incremental[bool]:
        """Wait for more text; False if none comes. Afterwards only ``position`` is valid, other offsets are not."""
        if self.is_closed:
            return False
        yield
        return True

    def mark(self, n_before: int = 0) -> None:
        """Keep the text read from here on, and the last ``n_before`` characters read before."""
        self._mark = self.position - n_before
        self._kept.clear()

    def take_marked(self) -> str:
        """The text read since the mark. Removes the mark."""
        read = "" if self._mark is None else "".join([*self._kept, self.text[self._mark : self.position]])
        self._mark = None
        self._kept.clear()
        return read

    @property
    def marked_length(self) -> int:
        """Characters read since the mark."""
        return 0 if self._mark is None else sum(map(len, self._kept)) + self.position - self._mark

    def rewind(self, marked_length: int = 0) -> None:
        """Go back to ``marked_length`` characters after the mark."""
        if self._mark is None:
            return
        if self._kept:
            self.text = "".join([*self._kept, self.text[self._mark :]])
            self._mark = 0
            self._kept.clear()
        self.position = self._mark + marked_length

    def peek(self) -> Incremental[str]:
        """The next character, or "" at the end."""
        while self.position == len(self.text):
            if not (yield from self.wait_for_more()):
                return ""
        return self.text[self.position]

    def skip_space(self) -> Incremental[None]:
        while (yield from self.peek()).isspace():
            self.position += 1

    def accept(self, literal: str) -> Incremental[bool]:
        """Read ``literal`` if it comes next. Return whether it did."""
        while len(self.text) - self.position < len(literal) and literal.startswith(self.text[self.position :]):
            if not (yield from self.wait_for_more()):
                return False
        if not self.text.startswith(literal, self.position):
            return False
        self.position += len(literal)
        return True

    def accept_after_space(self, literal: str) -> Incremental[bool]:
        """The same after white space, which is skipped in any case."""
        yield from self.skip_space()
        return (yield from self.accept(literal))

    def emit_to(self, stop: StopCharacters, emit: Emit) -> Incremental[None]:
        """Emit text up to the first character that ends it, which stays unread."""
        while True:
            match = stop.pattern.search(self.text, self.position)
            end = len(self.text) if match is None else match.start()
            emit(self.text[self.position : end])
            self.position = end
            if match is not None or not (yield from self._wait_in_plain_text(stop.has_none_in, emit)):
                return

    def emit_until(self, markers: Sequence[str], emit: Emit) -> Incremental[str]:
        """Emit text while it arrives, up to the first of ``markers``. Read and return the marker; "" at the end.

        No marker may be a prefix of another.
        """
        is_plain = _first_characters(tuple(markers)).isdisjoint
        while True:
            piece, marker = self._next_piece(markers)
            emit(piece)
            if marker:
                return marker
            if not (yield from self._wait_in_plain_text(is_plain, emit)):
                emit(self.text[self.position :])
                self.position = len(self.text)
                return ""

    def read_until(self, markers: Sequence[str]) -> Incremental[tuple[str, str]]:
        """The text up to the first of ``markers``, and the marker; "" if the text ends without one."""
        pieces: list[str] = []
        marker = yield from self.emit_until(markers, pieces.append)
        return "".join(pieces), marker

    def read_piece(self, markers: Sequence[str]) -> Incremental[tuple[str, str]]:
        """Some text before the first of ``markers``, and the marker if the text reaches it. At the end both are ""."""
        while True:
            piece, marker = self._next_piece(markers)
            if piece or marker:
                return piece, marker
            if not (yield from self.wait_for_more()):
                rest = self.text[self.position :]
                self.position = len(self.text)
                return rest, ""

    def _next_piece(self, markers: Sequence[str]) -> tuple[str, str]:
        """Read what has arrived, up to the first marker or to what may become one."""
        begin = self.position
        at, marker = _first(self.text, begin, markers)
        if marker:
            self.position = at + len(marker)
            return self.text[begin:at], marker
        self.position = len(self.text) - _partial_marker_length(self.text, begin, markers)
        return self.text[begin : self.position], ""

    def _wait_in_plain_text(self, is_plain: IsPlain, emit: Emit) -> Incremental[bool]:
        """Wait for more text. Plain pieces go to ``emit`` directly, unless text is held back or kept."""
        if self._mark is None and self.position == len(self.text):
            self._emit = emit
            self._is_plain = is_plain
        has_more = yield from self.wait_for_more()
        self._emit = None
        return has_more


@lru_cache(maxsize=256)
def _first_characters(markers: tuple[str, ...]) -> frozenset[str]:
    """The characters that may begin a marker."""
    return frozenset(marker[0] for marker in markers)


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _first(text: str, begin: int, markers: Sequence[str]) -> tuple[int, str]:
    """The first marker and its offset. One search for all: a search per marker would read a long text repeatedly."""
    if len(markers) > 1:
        match = _any_of(tuple(markers)).search(text, begin)
        return (-1, "") if match is None else (match.start(), match.group())
    at = text.find(markers[0], begin) if markers else -1
    return at, markers[0] if at >= 0 else ""


def _partial_marker_length(text: str, begin: int, markers: Sequence[str]) -> int:
    """Length of the longest beginning of a marker at the end of the text."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(begin, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
