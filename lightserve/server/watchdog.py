"""Kills processes that stop answering heartbeats: a process that hangs is worse than one that died."""

from __future__ import annotations

import asyncio

from lightserve.server.process_group import ProcessGroup

HEARTBEAT_S = 1.0
# A router that connects to a hanging worker hangs with it. The worker must be killed first, because it is the cause.
WORKER_TIMEOUT_SHARE = 0.5


async def watch_heartbeats(processes: ProcessGroup, timeout_s: float) -> None:
    """Kill every process that was ready and answers no heartbeat for ``timeout_s``; 0 disables this.

    The limit counts unanswered pings, not time: a launcher that was itself stopped has sent none meanwhile.
    """
    while timeout_s:
        await asyncio.sleep(HEARTBEAT_S)
        workers = [worker for engine in processes.engines for worker in engine.workers]
        for child in processes.children:
            if not child.ready.is_set() or child.exit_code is not None:
                continue
            limit_s = timeout_s * (WORKER_TIMEOUT_SHARE if child in workers else 1)
            if child.missed_heartbeats * HEARTBEAT_S > limit_s:
                child.kill(f"it did not answer for {limit_s:g} s")
            child.ping()
