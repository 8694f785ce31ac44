"""Text that arrives in pieces, for parsers that read it as if it were complete.

A parser is a generator over a stream: it yields when it needs more text than has arrived. The result does not depend on
where the text was split, so streamed and complete outputs are parsed alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Incremental = Generator[None, None, T]  # yields when it needs more text, returns T


class TextStream:
    def __init__(self) -> None:
        self.text = ""  # the unread text, and before it the text read since the mark
        self.position = 0  # the start of the unread text
        self.is_closed = False
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        kept = self.position if self._mark is None else self._mark
        self.text = self.text[kept:] + text
        self.position -= kept
        if self._mark is not None:
            self._mark = 0

    def close(self) -> None:
        """The text is complete."""
        self.is_closed = True

    def wait_for_more(self) -> Incremental[bool]:
        """Wait for more text; False if none comes. Afterwards only ``position`` is valid, other offsets are not."""
        if self.is_closed:
            return False
        yield
        return True

    def mark(self, n_before: int = 0) -> None:
        """Keep the text read from here on, and the last ``n_before`` characters read before."""
        self._mark = self.position - n_before

    def take_marked(self) -> str:
        """The text read since the mark. Removes the mark."""
        read = "" if self._mark is None else self.text[self._mark : self.position]
        self._mark = None
        return read

    @property
    def marked_length(self) -> int:
        """Characters read since the mark."""
        return 0 if self._mark is None else self.position - self._mark

    def rewind(self, marked_length: int = 0) -> None:
        """Go back to ``marked_length`` characters after the mark."""
        if self._mark is not None:
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

    def emit_run(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Incremental[None]:
        """Emit text as long as it matches a pattern of single characters."""
        while True:
            match = pattern.match(self.text, self.position)
            end = self.position if match is None else match.end()
            emit(self.text[self.position : end])
            self.position = end
            if end < len(self.text) or not (yield from self.wait_for_more()):
                return

    def emit_until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Incremental[str]:
        """Emit text while it arrives, up to the first of ``markers``. Read and return the marker; "" at the end.

        No marker may be a prefix of another.
        """
        while True:
            at, marker = _first(self.text, self.position, markers)
            if marker:
                emit(self.text[self.position : at])
                self.position = at + len(marker)
                return marker
            end = len(self.text) - _partial_marker_length(self.text, self.position, markers)
            emit(self.text[self.position : end])
            self.position = end
            if not (yield from self.wait_for_more()):
                emit(self.text[self.position :])
                self.position = len(self.text)
                return ""

    def read_until(self, markers: Sequence[str]) -> Incremental[tuple[str, str]]:
        """The text up to the first of ``markers``, and the marker; "" if the text ends without one."""
        pieces: list[str] = []
        marker = yield from self.emit_until(markers, pieces.append)
        return "".join(pieces), marker


def _first(text: str, begin: int, markers: Sequence[str]) -> tuple[int, str]:
    first, found = -1, ""
    for marker in markers:
        at = text.find(marker, begin)
        if at >= 0 and (first < 0 or at < first):
            first, found = at, marker
    return first, found


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
