"""The progress of a long transfer: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

BAR_WIDTH = 30  # characters
REDRAW_S = 0.1  # smooth, and slow enough for a slow terminal
LINE_S = 5.0  # enough to show in a log that the transfer continues


class Progress:
    """Counts bytes up to ``total``. Use it in a ``with`` statement, which writes the last line."""

    def __init__(
        self,
        label: str,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._total = total
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._start = self._shown = clock()
        self._ready = 0  # bytes that were present before the first advance
        self._done = 0

    def resume_at(self, done: int) -> None:
        """Start, or start again, with ``done`` bytes from an earlier run. They do not count for the rate."""
        self._ready = self._done = done
        self._start = self._clock()

    def advance(self, n_bytes: int) -> None:
        self._done += n_bytes
        now = self._clock()
        if now - self._shown >= (REDRAW_S if self._is_terminal else LINE_S):
            self._shown = now
            self._write(self._bar() if self._is_terminal else self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._write(f"{self._line()}, stopped", is_last=True)
            return
        self._write(f"{self._line()} in {self._clock() - self._start:.1f} s", is_last=True)

    def _line(self) -> str:
        return f"{self._label}: {self._percent():.0f} % of {format_bytes(self._total)}, {format_bytes(self._rate())}/s"

    def _bar(self) -> str:
        filled = round(BAR_WIDTH * self._percent() / 100)
        bar = "#" * filled + "-" * (BAR_WIDTH - filled)
        return f"{self._label} [{bar}] {self._percent():3.0f} % {format_bytes(self._rate())}/s"

    def _percent(self) -> float:
        return min(100.0, 100.0 * self._done / self._total) if self._total else 100.0

    def _rate(self) -> float:
        return (self._done - self._ready) / max(self._clock() - self._start, 1e-6)

    def _write(self, text: str, is_last: bool = False) -> None:
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{text}" + ("\n" if is_last else ""))  # \x1b[K clears the rest of a longer line
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def format_bytes(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"
