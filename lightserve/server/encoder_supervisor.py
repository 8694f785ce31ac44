"""Replaces an encoder that dies, unless its replacements fail again and again.

Requests whose images are encoded already go on meanwhile; the others wait. The router sends their images to the new
one.
"""

from __future__ import annotations

from lightserve.config import LaunchConfig
from lightserve.server.child_process import ChildDiedError, ChildProcess
from lightserve.server.process_group import ProcessGroup
from lightserve.server.supervisor import Supervisor


class EncoderSupervisor(Supervisor):
    singular, plural, restarted = "encoder", "encoders", "it"

    def __init__(self, processes: ProcessGroup, config: LaunchConfig) -> None:
        super().__init__(config)
        self._processes = processes

    @property
    def _child(self) -> ChildProcess:
        if self._processes.encoder is None:
            raise TypeError("a server without images has no encoder to supervise")
        return self._processes.encoder

    @property
    def _can_restart(self) -> bool:
        return self._processes.is_ready

    async def _wait_death(self) -> ChildDiedError:
        try:
            await self._child.watch()
        except ChildDiedError as died:
            return died
        raise TypeError("an encoder runs until the launcher kills it, so its watch cannot return")

    async def _replace(self) -> bool:
        await self._processes.replace_encoder()
        return True

    async def _join(self) -> str:
        await self._child.ready.wait()
        return ""

    def _kill(self, reason: str) -> None:
        self._child.kill(reason)
