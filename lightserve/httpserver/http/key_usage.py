"""What each API key uses, counted by all HTTP processes of the server together.

Each process writes its own rows of a file in the run directory, and reads those of the others; the rows with the rates
belong to all. No process waits for another one, so two that admit at the same moment may exceed a limit by one request.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path

FILE = "key_usage"
KEYS = 16_384  # rows of a process
MINUTE_NS = 60 * 10**9


class Column(IntEnum):
    """Of a row; each is a 64-bit number."""

    DIGEST = 0  # the first bytes of the key's digest; 0: the row is free
    RUNNING = 1
    FULL_AT_NS = 2  # when the key may send a whole minute's requests at once again; only in the rows of all
    REQUESTS = 3
    REFUSED_RATE = 4
    REFUSED_CONCURRENCY = 5
    PROMPT_TOKENS = 6
    OUTPUT_TOKENS = 7


WIDTH = len(Column)
ROW_BYTES = 8 * WIDTH


class KeyUsage:
    def __init__(
        self,
        run_dir: str | None = None,
        process: int = 0,
        num_processes: int = 1,
        now_ns: Callable[[], int] = time.monotonic_ns,  # of the machine: the same in all processes
    ) -> None:
        size = (num_processes + 1) * KEYS * ROW_BYTES  # the last rows belong to all processes
        self._cells = memoryview(_mapped(None if run_dir is None else Path(run_dir) / FILE, size)).cast("q")
        self._process, self._num_processes, self._now_ns = process, num_processes, now_ns
        if run_dir is not None:
            self._forget_running()

    def _forget_running(self) -> None:
        """Requests of a process that this one replaces have ended."""
        begin = self._process * KEYS
        for row in range(begin, begin + KEYS):
            if self._cells[row * WIDTH]:
                self._cells[row * WIDTH + Column.RUNNING] = 0

    def add(self, digest: bytes, column: Column, count: int = 1) -> None:
        self._cells[self._claimed_row(self._process, digest) + column] += count

    def count_request(self, digest: bytes) -> None:
        row = self._claimed_row(self._process, digest)
        self._cells[row + Column.REQUESTS] += 1
        self._cells[row + Column.RUNNING] += 1

    def take(self, digest: bytes, per_minute: int) -> float:
        """Take one of ``per_minute`` requests, which come back evenly. Returns 0, or the seconds until there is one."""
        cell = self._claimed_row(self._num_processes, digest) + Column.FULL_AT_NS
        now_ns, share_ns = self._now_ns(), MINUTE_NS // per_minute
        full_at_ns = max(self._cells[cell], now_ns) + share_ns
        if full_at_ns > now_ns + MINUTE_NS:
            return (full_at_ns - now_ns - MINUTE_NS) / 1e9
        self._cells[cell] = full_at_ns
        return 0.0

    def total(self, digest: bytes, column: Column) -> int:
        """Of all processes."""
        return sum(self._cells[row + column] for row in self._rows(digest))

    def _rows(self, digest: bytes) -> Iterator[int]:
        for process in range(self._num_processes):
            row = self._row(process, digest)
            if self._cells[row]:
                yield row

    def _claimed_row(self, process: int, digest: bytes) -> int:
        row = self._row(process, digest)
        self._cells[row] = _short(digest)
        return row

    def _row(self, process: int, digest: bytes) -> int:
        """Where a process counts this key, or would begin to. With more keys than rows, some share one."""
        short, begin = _short(digest), process * KEYS
        for step in range(KEYS):
            row = (begin + (short + step) % KEYS) * WIDTH
            if self._cells[row] in (0, short):
                return row
        return (begin + short % KEYS) * WIDTH


def _short(digest: bytes) -> int:
    return (int.from_bytes(digest[:8], "big") >> 1) or 1


def _mapped(path: Path | None, size: int) -> mmap.mmap:
    """``path`` None: of this process alone."""
    if path is None:
        return mmap.mmap(-1, size)
    with path.open("a+b") as file:
        file.truncate(size)  # the same size in every process; what is there stays
        return mmap.mmap(file.fileno(), size)
