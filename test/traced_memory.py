"""Memory that Python objects take, for tests that bound what a call may allocate or leave behind."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def kept_bytes(work: Callable[[], object]) -> int:
    """The bytes that are still allocated after ``work``."""
    return _traced(work)[0]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that ``work`` has allocated at once."""
    return _traced(work)[1]


def _traced(work: Callable[[], object]) -> tuple[int, int]:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
