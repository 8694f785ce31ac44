"""Text that arrives in pieces, for parsers that read it as if it were complete.

A parser is a generator over a stream: it yields when it needs more text than has arrived. The result does not depend on
where the text was split, so streamed and complete outputs are parsed alike. Reading takes linear time: a piece is
copied once, also while a mark keeps the text that was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Incremental = Generator[None, None, T]  # yields when it needs more text, returns T
Emit = Callable[[str], None]
IsPlain = Callable[[str], bool]


class PlainText(NamedTuple):
    """A kind of text that is emitted without looking at its characters one by one."""

    run: re.Pattern[str]  # as much of it as comes next
    is_plain: IsPlain  # for a piece of a few characters a set is twice as fast as the pattern
    replaced: Mapping[int, str] | None = None  # characters of a run that are emitted as other text; none is plain


class _Markers:
    """Finds the first of several markers, or the beginning of one at the end of a text."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.texts = frozenset(markers)
        beginnings = [f"{_beginnings(marker)}\\Z" for marker in markers if len(marker) > 1]
        self.find = re.compile("|".join([*map(re.escape, markers), *beginnings]) or r"\b\B").search
        self.is_absent = frozenset(marker[0] for marker in markers).isdisjoint


def _beginnings(marker: str) -> str:
    """A pattern of the proper beginnings of a marker: ``<(?:t(?:o)?)?`` for ``<too>``."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern


_compiled = lru_cache(maxsize=256)(_Markers)


class TextStream:
    def __init__(self) -> None:
        self.text = ""  # the unread text, and before it text that was read lately
        self.position = 0  # the start of the unread text
        self.is_closed = False
        self.is_cut = False  # it was cut off: it would have gone on
        self._mark: int | None = None
        self._kept: list[str] = []  # what was read since the mark and is no longer in ``text``
        # While the parser only emits text and has read all of it: where a plain piece goes, and whether it is one
        self.emit_plain: Emit | None = None
        self.is_plain: IsPlain = bool

    def feed(self, text: str) -> None:
        """Add a piece, for the parser to read."""
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.position])
            self._mark = 0
        self.text = self.text[self.position :] + text
        self.position = 0

    def close(self, is_cut: bool = False) -> None:
        """No text follows: it is complete, or it was cut off."""
        self.is_closed = True
        self.is_cut = is_cut

    @property
    def is_at_end(self) -> bool:
        """No text follows, and all of it was read."""
        return self.is_closed and self.position == len(self.text)

    @property
    def is_cut_off(self) -> bool:
        """The text was cut off, and all of it was read."""
        return self.is_cut and self.is_at_end

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

    def unread(self) -> None:
        """Go back to the mark, and remove it. What the text was cut off in stays read."""
        if not self.is_cut_off:
            self.rewind()
        self.take_marked()

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
                if self.is_cut and self._mark is not None:  # the literal was cut off: nothing else can follow
                    self.position = len(self.text)
                return False
        if not self.text.startswith(literal, self.position):
            return False
        self.position += len(literal)
        return True

    def accept_after_space(self, literal: str) -> Incremental[bool]:
        """The same after white space, which is skipped in any case."""
        yield from self.skip_space()
        return (yield from self.accept(literal))

    def accept_end(self, literal: str) -> Incremental[bool]:
        """The same for a marker that must follow: the beginning of it, in which the text was cut off, is read too."""
        is_read = yield from self.accept_after_space(literal)
        if not is_read and self.is_cut and literal.startswith(self.text[self.position :]):
            self.position = len(self.text)
        return is_read

    def emit_run(self, plain: PlainText, emit: Emit) -> Incremental[None]:
        """Emit text up to the first character that is not plain, which stays unread."""
        while True:
            match = plain.run.match(self.text, self.position)
            if match is not None:
                text = match.group()
                emit(text if plain.replaced is None else text.translate(plain.replaced))
                self.position = match.end()
            if self.position < len(self.text) or not (yield from self._wait_in_plain_text(plain.is_plain, emit)):
                return

    def emit_until(self, markers: Sequence[str], emit: Emit) -> Incremental[str]:
        """Emit text while it arrives, up to the first of ``markers``. Read and return the marker; "" at the end.

        No marker may be a prefix of another.
        """
        compiled = _compiled(tuple(markers))
        while True:
            piece, marker = self._next_piece(compiled)
            if piece:
                emit(piece)
            if marker:
                return marker
            if not (yield from self._wait_in_plain_text(compiled.is_absent, emit)):
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
        compiled = _compiled(tuple(markers))
        while True:
            piece, marker = self._next_piece(compiled)
            if piece or marker:
                return piece, marker
            if not (yield from self.wait_for_more()):
                rest = self.text[self.position :]
                self.position = len(self.text)
                return rest, ""

    def _next_piece(self, markers: _Markers) -> tuple[str, str]:
        """Read what has arrived, up to the first marker or to what may become one."""
        text, begin = self.text, self.position
        match = markers.find(text, begin)
        if match is None:
            self.position = len(text)
            return text[begin:], ""
        matched_text = match.group()
        is_whole = matched_text in markers.texts
        self.position = match.end() if is_whole else match.start()
        return text[begin : match.start()], matched_text if is_whole else ""

    def _wait_in_plain_text(self, is_plain: IsPlain, emit: Emit) -> Incremental[bool]:
        """Wait for more text. Plain pieces go to ``emit`` directly, unless text is held back or kept."""
        if self.is_closed:
            return False
        if self._mark is None and self.position == len(self.text):
            self.emit_plain = emit
            self.is_plain = is_plain
        yield
        self.emit_plain = None
        return True
