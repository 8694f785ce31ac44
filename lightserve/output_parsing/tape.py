"""Text that comes in pieces, for parsers that read it as if all of it were there.

A parser is a generator over a tape: it yields where it needs more text than has come. What it reads does not depend on
where the text was cut, so a stream and a whole answer are parsed alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


class Tape:
    def __init__(self) -> None:
        self.text = ""  # what is not read yet, and before it what was read since the mark
        self.at = 0  # where the unread text begins
        self.is_over = False
        self._mark: int | None = None

    def feed(self, text: str) -> None:
        kept = self.at if self._mark is None else self._mark
        self.text = self.text[kept:] + text
        self.at -= kept
        if self._mark is not None:
            self._mark = 0

    def close(self) -> None:
        """No text comes any more."""
        self.is_over = True

    def more(self) -> Steps[bool]:
        """Wait for more text; False where none comes. Positions in ``text`` are void afterwards, but for ``at``."""
        if self.is_over:
            return False
        yield
        return True

    def mark(self, n_before: int = 0) -> None:
        """Keep what is read from here on, and the last ``n_before`` characters that were read."""
        self._mark = self.at - n_before

    def unmark(self) -> str:
        """What was read since the mark, which is gone now."""
        read = "" if self._mark is None else self.text[self._mark : self.at]
        self._mark = None
        return read

    @property
    def n_marked(self) -> int:
        """How much was read since the mark."""
        return 0 if self._mark is None else self.at - self._mark

    def rewind(self, n_marked: int = 0) -> None:
        """Back to where only so much had been read since the mark."""
        if self._mark is not None:
            self.at = self._mark + n_marked

    def peek(self) -> Steps[str]:
        """The next character, or "" at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()).isspace():
            self.at += 1

    def accept(self, literal: str) -> Steps[bool]:
        """Whether this comes next; it is read then."""
        while len(self.text) - self.at < len(literal) and literal.startswith(self.text[self.at :]):
            if not (yield from self.more()):
                return False
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def accept_next(self, literal: str) -> Steps[bool]:
        """The same after white space, which is read in any case."""
        yield from self.skip_space()
        return (yield from self.accept(literal))

    def pass_run(self, pattern: re.Pattern[str], give: Callable[[str], None]) -> Steps[None]:
        """Give out all that comes and matches a pattern of single characters."""
        while True:
            match = pattern.match(self.text, self.at)
            end = self.at if match is None else match.end()
            give(self.text[self.at : end])
            self.at = end
            if end < len(self.text) or not (yield from self.more()):
                return

    def pass_until(self, markers: Sequence[str], give: Callable[[str], None]) -> Steps[str]:
        """Give out text as it comes, up to the first of ``markers``, which is read: the marker, or "" at the end.

        No marker may be the beginning of another.
        """
        while True:
            at, marker = _first(self.text, self.at, markers)
            if marker:
                give(self.text[self.at : at])
                self.at = at + len(marker)
                return marker
            end = len(self.text) - _n_begun(self.text, self.at, markers)
            give(self.text[self.at : end])
            self.at = end
            if not (yield from self.more()):
                give(self.text[self.at :])
                self.at = len(self.text)
                return ""

    def read_until(self, markers: Sequence[str]) -> Steps[tuple[str, str]]:
        """The text up to the first of ``markers``, and the marker: "" where the text ended before one came."""
        pieces: list[str] = []
        marker = yield from self.pass_until(markers, pieces.append)
        return "".join(pieces), marker


def _first(text: str, begin: int, markers: Sequence[str]) -> tuple[int, str]:
    first, found = -1, ""
    for marker in markers:
        at = text.find(marker, begin)
        if at >= 0 and (first < 0 or at < first):
            first, found = at, marker
    return first, found


def _n_begun(text: str, begin: int, markers: Sequence[str]) -> int:
    """How much of a marker the text may end with."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(begin, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
