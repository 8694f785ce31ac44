"""How long the threads of a server wait for a core: what the kernel counts of each (Linux)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

PERIOD_S = 0.05


class Waits(NamedTuple):
    """Of all threads, in some time."""

    sum_s: float
    longest_s: float  # of one thread


class CoreWaits:
    """Samples this process and its descendants, from the begin of a ``with`` block to its end."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._samples: list[dict[int, int]] = []  # ns that each thread has waited
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def during(self, begin_s: float, end_s: float) -> Waits:
        """Of ``time.monotonic``, to the next sample: a wait is counted when it ends."""
        first = max(int(np.searchsorted(self._times, begin_s)) - 1, 0)
        last = min(int(np.searchsorted(self._times, end_s)) + 1, len(self._times) - 1)
        before, after = self._samples[first], self._samples[last]
        waited = [after[thread] - before.get(thread, 0) for thread in after]
        return Waits(sum(waited) / 1e9, max(waited, default=0) / 1e9)

    def _run(self) -> None:
        while not self._has_ended.wait(PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        begin_s, own = time.monotonic(), self._thread.native_id
        self._samples.append({thread: waited_ns(path) for thread, path in threads_below(os.getpid()) if thread != own})
        self._times.append(begin_s)  # last: ``during`` reads so many samples


def threads_below(pid: int) -> Iterator[tuple[int, Path]]:
    """The threads of a process and of its descendants, with their folders."""
    for folder in _folders(Path(f"/proc/{pid}/task")):
        yield int(folder.name), folder
        for child in _read(folder / "children").split():
            yield from threads_below(int(child))


def waited_ns(thread: Path) -> int:
    fields = _read(thread / "schedstat").split()
    return int(fields[1]) if len(fields) > 1 else 0


def _folders(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:  # the process has ended
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
