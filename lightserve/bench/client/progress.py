"""The progress of one run: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from lightserve.bench.client.record import Record
from lightserve.utils.progress import BAR_WIDTH, LINE_S, REDRAW_S
from lightserve.utils.terminal import CLEAR_LINE, Style


class RequestProgress:
    """Counts requests that ended. Several threads may call ``count``."""

    def __init__(
        self, label: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = label
        self._total = total
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_terminal = Style(self._stream).is_terminal
        self._start = self._shown = clock()
        self._lock = threading.Lock()
        self._done = self._failed = self._tokens = 0

    def count(self, record: Record) -> None:
        with self._lock:
            self._done += 1
            self._failed += bool(record.error)
            self._tokens += record.output_tokens or len(record.event_times)
            now = self._clock()
            if now - self._shown >= (REDRAW_S if self._is_terminal else LINE_S):
                self._shown = now
                self._write(self._bar() if self._is_terminal else self._line())

    def finish(self) -> None:
        if self._is_terminal:
            self._write(f"{self._bar()}\n")

    def _line(self) -> str:
        seconds = max(self._clock() - self._start, 1e-6)
        failed = f", {self._failed} failed" if self._failed else ""
        rate = f"{self._tokens / seconds:,.0f} tok/s"
        return f"{self._label}: {self._done}/{self._total} requests{failed}, {rate}, {seconds:.0f} s"

    def _bar(self) -> str:
        filled = round(BAR_WIDTH * self._done / max(self._total, 1))
        return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {self._line()}"

    def _write(self, text: str) -> None:
        self._stream.write(CLEAR_LINE + text if self._is_terminal else f"{text}\n")
        self._stream.flush()
