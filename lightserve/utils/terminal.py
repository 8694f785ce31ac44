"""Colours for people at a terminal. Files, pipes and NO_COLOR (no-color.org) get plain text."""

from __future__ import annotations

import os
from typing import TextIO

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
_RESET = "\x1b[0m"
CLEAR_LINE = "\r\x1b[K"


class Style:
    """The escape sequences that ``stream`` may get: none unless it is a terminal that shows colours."""

    def __init__(self, stream: TextIO) -> None:
        self.is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"  # a dumb one cannot clear a line
        self.has_colors = self.is_terminal and not os.environ.get("NO_COLOR")

    def begin(self, name: str) -> str:
        return f"\x1b[{_CODES[name]}m" if self.has_colors else ""

    @property
    def end(self) -> str:
        return _RESET if self.has_colors else ""

    def paint(self, name: str, text: str) -> str:
        return f"{self.begin(name)}{text}{self.end}"


def columns_of(stream: TextIO) -> int | None:
    """The width of a terminal; None: it is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # not a terminal, or not even a file
        return None


def printable(text: str) -> str:
    """Text of a stranger without the control characters that move a cursor or change a terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
