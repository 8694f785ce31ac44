"""Waiting for a condition, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

DEADLINE_S = 180.0  # a worker is back after 3 s; a machine that must read its files from disk again is no failure
PAUSE_SHARE = 9.0  # pauses take so much longer than the condition: a test that waits takes a tenth of a core
LONGEST_PAUSE_S = 0.1  # some conditions hold only for a while


async def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110  the condition is anyone's, there is no event to wait for
            await asyncio.sleep(0.001)


def wait_until(
    condition: Callable[[], bool],
    deadline_s: float = DEADLINE_S,
    pause_s: float = 0.01,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """The same without a loop, for what other processes do.

    A condition that takes long, such as one about the metrics of a server, is asked less often: the processes that it
    waits for need the cores. Whenever ``progress`` returns something new, the deadline begins again: then what many
    steps take in all does not matter.
    """
    end, last = time.monotonic() + deadline_s, progress()
    while True:
        begin = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        before, last = last, progress()
        if last != before:
            end = now + deadline_s
        if now > end:
            after = "" if last is None else f" after {last}"
            raise TimeoutError(f"not so within {deadline_s} s{after}")
        time.sleep(max(pause_s, min(PAUSE_SHARE * (now - begin), LONGEST_PAUSE_S)))


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more. Nobody may have asked for its exit code yet."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
