"""How an answer looks while it arrives: thinking dimmed, then the text, then tokens and speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from lightserve.cli.chat.client import Delta
from lightserve.utils.terminal import Style, printable


class AnswerView:
    """Prints the pieces of one answer. ``content`` is what the conversation keeps."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stdout
        self._style = Style(self._out)
        self._clock = clock
        self._sent_s = clock()
        self._first_s: float | None = None
        self._last_s = self._sent_s
        self._pieces = 0
        self._tokens: int | None = None  # as the server counts them
        self._finish_reason: str | None = None
        self._is_thinking = False
        self.content = ""

    def show(self, deltas: Iterator[Delta]) -> None:
        try:
            for delta in deltas:
                self._show(delta)
        finally:
            self._end_thinking()
            self._write("\n")

    def _show(self, delta: Delta) -> None:
        if delta.thinking or delta.content:
            self._last_s = self._clock()
            self._first_s = self._first_s or self._last_s
            self._pieces += 1
        if delta.thinking:
            self._begin_thinking()
            self._write(printable(delta.thinking))
        if delta.content:
            self._end_thinking()
            self.content += delta.content
            self._write(printable(delta.content))
        self._finish_reason = delta.finish_reason or self._finish_reason
        if delta.usage is not None:
            self._tokens = delta.usage.get("completion_tokens")

    def _begin_thinking(self) -> None:
        if not self._is_thinking:
            self._write(self._style.begin("dim") or "(thinking) ")
            self._is_thinking = True

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._write(f"{self._style.end}\n\n")
            self._is_thinking = False

    def summary(self, is_stopped: bool = False) -> str:
        """One line: tokens, speed, and why the answer ended if that is unusual."""
        tokens = self._pieces if self._tokens is None else self._tokens
        parts = [f"{tokens} tokens"]
        if self._first_s is not None:
            decode_s = self._last_s - self._first_s
            if tokens > 1 and decode_s > 0:
                parts.append(f"{(tokens - 1) / decode_s:.1f} tokens/s")
            parts.append(f"first after {self._first_s - self._sent_s:.2f} s")
        if is_stopped:
            parts.append("stopped")
        elif self._finish_reason not in (None, "stop"):
            parts.append({"length": "cut at the length limit"}.get(str(self._finish_reason), str(self._finish_reason)))
        return self._style.paint("dim", f"[{', '.join(parts)}]")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
