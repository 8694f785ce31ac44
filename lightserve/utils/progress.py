"""The progress of a long task: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from lightserve.utils.logger import fields, init_logger, is_json
from lightserve.utils.terminal import CLEAR_LINE, Style, columns_of

BAR_WIDTH = 30  # characters
REDRAW_S = 0.1  # smooth, and slow enough for a slow terminal
LINE_S = 5.0  # enough to show in a log that the task continues

Clock = Callable[[], float]
Unit = Literal["bytes", "items"]
logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProgressState:
    label: str
    done: int = 0
    total: int = 0  # 0: unknown
    unit: Unit = "bytes"
    rate: float = 0.0  # per second
    seconds: float = 0.0
    status: Literal["running", "finished", "stopped"] = "running"

    @property
    def percent(self) -> float:
        return min(100.0, 100.0 * self.done / self.total) if self.total else 100.0

    def line(self) -> str:
        """For a log."""
        text = f"{self.label}: {self.percent:.0f} % of {self._amount(self.total)}{self._rate(', ')}"
        if self.status == "running":
            return text
        return f"{text}, stopped" if self.status == "stopped" else f"{text} in {self.seconds:.1f} s"

    def bar(self) -> str:
        """For a terminal."""
        if not self.total:
            return f"{self.label} ..."
        filled = round(BAR_WIDTH * self.percent / 100)
        bar = "#" * filled + "-" * (BAR_WIDTH - filled)
        return f"{self.label} [{bar}] {self.percent:3.0f} %{self._rate(' ')}"

    def _amount(self, number: float) -> str:
        return format_bytes(number) if self.unit == "bytes" else f"{number:.0f}"

    def _rate(self, separator: str) -> str:
        return f"{separator}{format_bytes(self.rate)}/s" if self.unit == "bytes" else ""


class ProgressOutput(Protocol):
    """Where progress is shown. It gets every state and decides how often to show one."""

    def show(self, state: ProgressState) -> None: ...


class StreamOutput:
    """A terminal or a log. ``keeps_lines``: the last state of a task stays on the terminal."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic, keeps_lines: bool = True) -> None:
        self._stream = stream
        self._is_terminal = Style(stream).is_terminal and not is_json()
        self._clock = clock
        self._keeps_lines = keeps_lines
        self._label = ""
        self._shown_s = clock()

    def show(self, state: ProgressState) -> None:
        now, is_new = self._clock(), state.label != self._label
        if is_new:
            self._label = state.label
        is_due = now - self._shown_s >= (REDRAW_S if self._is_terminal else LINE_S)
        if state.status == "running" and not is_due and not (is_new and self._is_terminal):
            return
        self._shown_s = now
        if self._is_terminal:
            self._draw(state)
        elif state.total or state.status != "running":
            self._write(state)

    def _draw(self, state: ProgressState) -> None:
        is_last = state.status != "running" and (self._keeps_lines or state.status == "stopped")
        columns = columns_of(self._stream)
        room = columns and columns - 1  # a bar of two lines cannot be cleared
        text = state.line() if is_last else state.bar()[:room]
        self._stream.write(CLEAR_LINE + text + ("\n" if is_last else ""))
        self._stream.flush()

    def _write(self, state: ProgressState) -> None:
        if is_json() and self._stream is sys.stderr:
            details = fields(phase=state.label, done=state.done, total=state.total, unit=state.unit)
            logger.info(state.line(), extra=details)
            return
        self._stream.write(f"{state.line()}\n")
        self._stream.flush()


_output: ProgressOutput | None = None


def use_output(output: ProgressOutput | None) -> None:
    """Where this process shows progress from now on; None: on stderr."""
    global _output
    _output = output


class Progress:
    """Counts up to ``total``. Use it in a ``with`` statement, which shows the end."""

    def __init__(
        self,
        label: str,
        total: int,
        stream: TextIO | None = None,
        clock: Clock = time.monotonic,
        unit: Unit = "bytes",
    ) -> None:
        self._label = label
        self._total = total
        self._unit = unit
        self._clock = clock
        stderr_output = StreamOutput(stream or sys.stderr, clock)
        self._output = _output if _output is not None and stream is None else stderr_output
        self._start = clock()
        self._ready = 0  # that was present before the first advance
        self._done = 0

    def resume_at(self, done: int) -> None:
        """Start, or start again, with what an earlier run has done. It does not count for the rate."""
        self._ready = self._done = done
        self._start = self._clock()

    def advance(self, amount: int) -> None:
        self._done += amount
        self._output.show(self._state("running"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._output.show(self._state("finished" if kind is None else "stopped"))

    def _state(self, status: Literal["running", "finished", "stopped"]) -> ProgressState:
        seconds = self._clock() - self._start
        rate = (self._done - self._ready) / max(seconds, 1e-6)
        return ProgressState(self._label, self._done, self._total, self._unit, rate, seconds, status)


def format_bytes(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"
