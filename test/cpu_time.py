"""CPU time of this process, for tests that compare two measurements of one run instead of asserting seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

REPEATS = 3  # the fastest counts: other programs only make a run slower


def cpu_seconds(work: Callable[[], object]) -> float:
    return min(_once(work) for _ in range(REPEATS))


def _once(work: Callable[[], object]) -> float:
    """Without the garbage collector, as in timeit: a pass over the objects of all tests takes longer than work."""
    gc.disable()
    try:
        begin_s = time.process_time()
        work()
        return time.process_time() - begin_s
    finally:
        gc.enable()


def growth(work: Callable[[int], object], size: int) -> float:
    """How many times longer four times the work takes: about 4 if time is linear, about 16 if it is quadratic.

    A neighbour that fills the caches slows the whole more than its quarter, so what is not linear is measured again.
    """
    ratios = [_growth(work, size)]
    while ratios[-1] > 6 and len(ratios) < REPEATS:
        ratios.append(_growth(work, size))
    return min(ratios)


def _growth(work: Callable[[int], object], size: int) -> float:
    """Both are measured in turn: a neighbour that slows the caches down for a while then slows both."""
    pairs = [(_once(lambda: work(size)), _once(lambda: work(size // 4))) for _ in range(REPEATS + 2)]
    return min(whole for whole, _ in pairs) / min(quarter for _, quarter in pairs)
