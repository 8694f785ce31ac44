"""A process that is there and does nothing is worse than one that died: it is made to die."""

from __future__ import annotations

import asyncio

from lightserve.server.fleet import Fleet

TICK_S = 1.0
# A router that connects to a worker which reads nothing waits with it, and must not be taken for the cause.
SHARE_OF_WORKERS = 0.5


async def watch_for_silence(fleet: Fleet, timeout_s: float) -> None:
    """Kill every process that was ready once and answers nothing for ``timeout_s``; 0: none.

    Unanswered questions are counted, not time: a launcher that was stopped itself has asked nothing meanwhile.
    """
    while timeout_s:
        await asyncio.sleep(TICK_S)
        for child in fleet.children:
            if not child.ready.is_set() or child.exit_code is not None:
                continue
            limit_s = timeout_s * (SHARE_OF_WORKERS if child in fleet.workers else 1)
            if child.unanswered * TICK_S > limit_s:
                child.put_down(f"it did not answer for {limit_s:g} s")
            child.ping()
