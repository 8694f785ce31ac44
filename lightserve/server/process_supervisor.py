"""Replaces a single process that dies, unless its replacements fail again and again.

- An HTTP process: the launcher keeps the listening socket, so connections that come meanwhile wait in its queue for the
  new process. The router aborts the requests of the dead one.
- The encoder: requests whose images are encoded already go on meanwhile. The router sends the images of the others to
  the new one.
"""

from __future__ import annotations

from abc import abstractmethod

from lightserve.config import LaunchConfig
from lightserve.server.child_process import ChildDiedError, ChildProcess
from lightserve.server.engine_processes import EngineProcesses
from lightserve.server.process_group import ProcessGroup
from lightserve.server.supervisor import Supervisor


class ProcessSupervisor(Supervisor):
    restarted = "it"

    def __init__(self, processes: ProcessGroup, config: LaunchConfig) -> None:
        super().__init__(config)
        self._processes = processes

    @property
    @abstractmethod
    def _child(self) -> ChildProcess:
        """The present one."""

    @property
    def _can_restart(self) -> bool:
        return self._processes.is_ready

    async def _wait_death(self) -> ChildDiedError:
        try:
            await self._child.watch()
        except ChildDiedError as died:
            return died
        raise TypeError(f"the {self.singular} runs until the launcher kills it, so its watch cannot return")

    async def _join(self) -> str:
        await self._child.ready.wait()
        return ""

    def _kill(self, reason: str) -> None:
        self._child.kill(reason)


class HttpSupervisor(ProcessSupervisor):
    singular, plural = "HTTP process", "HTTP processes"

    def __init__(self, processes: ProcessGroup, index: int, config: LaunchConfig) -> None:
        super().__init__(processes, config)
        self._index = index

    @property
    def _child(self) -> ChildProcess:
        return self._processes.httpservers[self._index]

    async def _replace(self) -> bool:
        await self._processes.replace_httpserver(self._index)
        return True


class EncoderSupervisor(ProcessSupervisor):
    singular, plural = "encoder", "encoders"

    def __init__(self, processes: ProcessGroup, engine: EngineProcesses, index: int, config: LaunchConfig) -> None:
        super().__init__(processes, config)
        self._engine = engine
        self._index = index

    @property
    def _child(self) -> ChildProcess:
        return self._engine.encoders[self._index]

    def _count_restart(self) -> None:
        """Routers that die again and again take their encoders with them: that ends an engine, not the server."""
        if self._index not in self._engine.stopped_encoders:
            super()._count_restart()

    async def _replace(self) -> bool:
        await self._engine.replace_encoder(self._index)
        return True
