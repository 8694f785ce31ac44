"""The processes of one server, as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightserve.config import ServerConfig
from lightserve.io_struct import EngineReady, ToChild
from lightserve.server.child import Child, ChildDiedError
from lightserve.utils.process import Boot

# In a worker's environment before it imports torch. OpenMP threads that spin while they wait lose 4x as soon as another
# process wants a core, and here others always do; threads that sleep at once lose 1.3x. So they spin for microseconds.
WORKER_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

LAST_BYTES_S = 0.2  # from the end of the last request to that of its last byte
BLINK_S = 0.2  # within which the processes that one death takes along complain of it
KILL_S = 4.0  # until a killed process is gone, which a driver may hold up


@dataclass(frozen=True, slots=True)
class Modules:
    """What each role runs."""

    worker: str = "lightserve.router.model_infer.main"
    null_worker: str = "lightserve.router.model_infer.null_worker"
    router: str = "lightserve.router.main"
    detokenizer: str = "lightserve.detokenization.main"
    httpserver: str = "lightserve.httpserver.main"


class Fleet:
    def __init__(self, config: ServerConfig, run_dir: str, modules: Modules) -> None:
        self.children: list[Child] = []  # those that were started so far
        self._workers: list[Child] = []
        self._httpservers: list[Child] = []
        self._config = config
        self._run_dir = run_dir
        self._modules = modules

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start every process, those that take longest first; an HTTP process for each of ``sockets``."""
        config, modules = self._config, self._modules
        worker = modules.null_worker if config.launch.null_worker else modules.worker
        for rank in range(config.worker.tp):
            self._workers.append(await self._start(f"model worker {rank}", worker, self._boot(rank), WORKER_ENV))
        await self._start("detokenizer", modules.detokenizer, self._boot())
        self._router = await self._start("router", modules.router, self._boot())
        for index, sock in enumerate(sockets):
            with sock:
                boot = self._boot(index, sock.fileno())
                self._httpservers.append(await self._start(f"httpserver {index}", modules.httpserver, boot))

    async def ready(self) -> EngineReady:
        """Pass on the ready word: from the workers to the router, then to the HTTP processes, which open."""
        for worker in self._workers:
            await worker.ready.wait()
        engine = self._workers[0].engine  # the ranks have agreed
        if engine is None:
            raise TypeError("a worker's ready word is EngineReady")
        self._router.send(engine)
        for child in self.children:
            await child.ready.wait()
        self._tell_httpservers(engine)
        return engine

    async def wind_up(self, *messages: ToChild, within_s: float) -> bool:
        """Send the HTTP processes what makes them finish; whether they did in time."""
        self._tell_httpservers(*messages)
        try:
            async with asyncio.timeout(within_s):
                for child in self._httpservers:
                    if child.exit_code is None:
                        await child.drained.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(LAST_BYTES_S)
        return True

    async def culprit(self, died: ChildDiedError) -> ChildDiedError:
        """The death that began it: the complaint of another about a process that was killed may come first."""
        if died.exit_code < 0:
            return died
        await asyncio.sleep(BLINK_S)
        killed = (child for child in self.children if (child.exit_code or 0) < 0)
        return next((ChildDiedError(child, child.exit_code or 0) for child in killed), died)

    async def end(self) -> list[Child]:
        """Kill every process; those that would not go."""
        for child in self.children:
            child.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                for child in self.children:
                    await child.wait()
        return [child for child in self.children if child.exit_code is None]

    def _tell_httpservers(self, *messages: ToChild) -> None:
        for child in self._httpservers:
            for message in messages:
                child.send(message)

    def _boot(self, index: int = 0, listen_fd: int | None = None) -> Boot:
        return Boot(self._config, self._run_dir, index, listen_fd)

    async def _start(self, role: str, module: str, boot: Boot, env: Mapping[str, str] | None = None) -> Child:
        child = await Child.start(role, module, boot, env or {})
        self.children.append(child)
        return child
