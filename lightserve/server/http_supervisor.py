"""Replaces an HTTP process that dies, unless its replacements fail again and again.

The launcher keeps the listening socket: connections that come meanwhile wait in its queue for the new process. The
router aborts the requests of the dead one.
"""

from __future__ import annotations

from lightserve.config import LaunchConfig
from lightserve.server.child_process import ChildDiedError, ChildProcess
from lightserve.server.process_group import ProcessGroup
from lightserve.server.supervisor import Supervisor


class HttpSupervisor(Supervisor):
    """Of one HTTP process."""

    singular, plural, restarted = "HTTP process", "HTTP processes", "it"

    def __init__(self, processes: ProcessGroup, index: int, config: LaunchConfig) -> None:
        super().__init__(config)
        self._processes = processes
        self._index = index

    @property
    def _child(self) -> ChildProcess:
        return self._processes.httpservers[self._index]

    @property
    def _can_restart(self) -> bool:
        return self._processes.is_ready

    async def _wait_death(self) -> ChildDiedError:
        try:
            await self._child.watch()
        except ChildDiedError as died:
            return died
        raise TypeError("an HTTP process runs until the launcher kills it, so its watch cannot return")

    async def _replace(self) -> bool:
        await self._processes.replace_httpserver(self._index)
        return True

    async def _join(self) -> str:
        await self._child.ready.wait()
        return ""

    def _kill(self, reason: str) -> None:
        self._child.kill(reason)
