"""The processes of one server, as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightserve.config import ServerConfig
from lightserve.io_struct import EngineReady, ToChild
from lightserve.server.child import Child, ChildDiedError
from lightserve.utils.process import Boot

# In a worker's environment before it imports torch. OpenMP threads that spin while they wait lose 4x as soon as another
# process wants a core, and here others always do; threads that sleep at once lose 1.3x. So they spin for microseconds.
# The libraries of collectives would listen at the machine's own address; ranks of one machine need loopback alone.
WORKER_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}

LAST_BYTES_S = 0.2  # from the end of the last request to that of its last byte
BLINK_S = 0.2  # within which the processes that one death takes along complain of it
KILL_S = 4.0  # until a killed process is gone, which a driver may hold up


@dataclass(frozen=True, slots=True)
class Modules:
    """What each role runs."""

    worker: str = "lightserve.worker.main"
    null_worker: str = "lightserve.worker.null_worker"
    router: str = "lightserve.router.main"
    detokenizer: str = "lightserve.detokenization.main"
    httpserver: str = "lightserve.httpserver.main"


class Fleet:
    def __init__(self, config: ServerConfig, run_dir: str, modules: Modules) -> None:
        self.children: list[Child] = []  # those that were started so far, without workers that were replaced
        self.workers: list[Child] = []
        self.generation = 0  # of the workers: counts the times that they were replaced
        self.ready_s = 0.0  # when that was
        self.engine: EngineReady | None = None  # of the first workers, once all processes are ready
        self._httpservers: list[Child] = []
        self._config = config
        self._run_dir = run_dir
        self._modules = modules

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start every process, those that take longest first; an HTTP process for each of ``sockets``."""
        modules = self._modules
        await self.start_workers()
        await self._start("detokenizer", modules.detokenizer, self._boot())
        self.router = await self._start("router", modules.router, self._boot())
        for index, sock in enumerate(sockets):
            with sock:
                boot = self._boot(index, sock.fileno())
                self._httpservers.append(await self._start(f"httpserver {index}", modules.httpserver, boot))

    async def ready(self) -> EngineReady:
        """Pass on the ready word: from the workers to the router, then to the HTTP processes, which open."""
        engine = await self.workers_ready()
        self.router.send(engine)
        for child in self.children:
            await child.ready.wait()
        self._tell_httpservers(engine)
        for child in self._httpservers:
            await child.obeyed()  # else who reads "ready" and asks at once might hear that the model is loading
        self.engine, self.ready_s = engine, time.monotonic()
        return engine

    async def workers_ready(self) -> EngineReady:
        """Wait for the ready word of all of them."""
        for worker in self.workers:
            await worker.ready.wait()
        engine = self.workers[0].engine  # the ranks have agreed
        if engine is None:
            raise TypeError("a worker's ready word is EngineReady")
        return engine

    async def worker_death(self) -> ChildDiedError:
        """Wait for one."""
        watching = [asyncio.create_task(worker.watch()) for worker in self.workers]
        try:
            await asyncio.gather(*watching)
        except ChildDiedError as died:
            return await self.culprit(died)
        finally:
            for task in watching:
                task.cancel()
        raise TypeError("a worker is never done")

    async def bury_workers(self, within_s: float) -> bool:
        """End workers of which one died; whether none is left."""
        met = [self._boot().worker_path(rank, self.generation) for rank in range(len(self.workers))]
        self.generation += 1
        for worker in self.workers:
            worker.kill()
        try:
            async with asyncio.timeout(within_s):
                for worker in self.workers:
                    await worker.wait()
        except TimeoutError:
            return False
        self.children = [child for child in self.children if child not in self.workers]
        self.workers = []
        for path in (*met, self._boot().path("tp")):  # where the router met them, and they one another
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return True

    async def start_workers(self) -> None:
        """Those that replace others have as much KV as they had: the router and the clients know no other size."""
        config = self._config
        if self.engine is not None:
            size = self.engine.max_total_token_num
            config = replace(config, worker=replace(config.worker, max_total_token_num=size))
        module = self._modules.null_worker if config.launch.null_worker else self._modules.worker
        for rank in range(config.worker.tp):
            boot = Boot(config, self._run_dir, rank, generation=self.generation)
            self.workers.append(await self._start(f"model worker {rank}", module, boot, WORKER_ENV))

    def put_down_workers(self, why: str) -> None:
        for worker in self.workers:
            worker.put_down(why)

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
        """The death that began it: one that complains of it, or that ends because of it, may come first."""
        if died.exit_code < 0:
            return died
        await asyncio.sleep(BLINK_S)
        others = [ChildDiedError(child, child.exit_code) for child in self.children if child.exit_code]
        killed = [other for other in others if other.exit_code < 0]
        failed = others if died.exit_code == 0 else []  # a worker whose router is gone ends in peace
        return next(iter(killed + failed), died)

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
