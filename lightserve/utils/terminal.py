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
        self.is_terminal = stream.isatty()
        self.has_colors = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def begin(self, name: str) -> str:
        return f"\x1b[{_CODES[name]}m" if self.has_colors else ""

    @property
    def end(self) -> str:
        return _RESET if self.has_colors else ""

    def paint(self, name: str, text: str) -> str:
        return f"{self.begin(name)}{text}{self.end}"


def printable(text: str) -> str:
    """Text of a stranger without the control characters that move a cursor or change a terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
