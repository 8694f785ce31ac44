"""All child processes of one server: start them, pass the ready message on, drain, kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from lightserve.config import ServerConfig
from lightserve.io_struct import EngineReady, ToChild
from lightserve.server.child_process import ChildDiedError, ChildProcess
from lightserve.server.start_display import StartDisplay
from lightserve.utils.process import ChildConfig

# A worker gets these before it imports torch. OpenMP threads that spin while they wait run 4x slower as soon as another
# process needs a core, which is always the case here; threads that sleep at once run 1.3x slower. So they spin for
# microseconds. NCCL and gloo would listen on the machine's own address; ranks on one machine need only loopback.
WORKER_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}

FLUSH_S = 0.2  # from the end of the last request until its last byte is sent
EXIT_SETTLE_S = 0.2  # one death makes other processes exit too: within this time
KILL_TIMEOUT_S = 4.0  # until a killed process has exited; a GPU driver may delay that


@dataclass(frozen=True, slots=True)
class Modules:
    """The Python module that each kind of process runs."""

    worker: str = "lightserve.worker.main"
    null_worker: str = "lightserve.worker.null_worker"
    router: str = "lightserve.router.main"
    detokenizer: str = "lightserve.detokenization.main"
    httpserver: str = "lightserve.httpserver.main"


class ProcessGroup:
    def __init__(self, config: ServerConfig, run_dir: str, modules: Modules) -> None:
        self.children: list[ChildProcess] = []  # every process started so far, except workers that were replaced
        self.workers: list[ChildProcess] = []
        self.generation = 0  # how many times the workers were replaced
        self.ready_s = 0.0  # when all processes were ready
        self.engine: EngineReady | None = None  # from the first workers, once all processes are ready
        self._httpservers: list[ChildProcess] = []
        self._config = config
        self._run_dir = run_dir
        self._modules = modules
        self._start_display = StartDisplay()

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start every process, the slowest to load first, and one HTTP process for each of ``sockets``."""
        modules = self._modules
        await self.start_workers()
        await self._start("detokenizer", modules.detokenizer, self._child_config())
        self.router = await self._start("router", modules.router, self._child_config())
        for index, sock in enumerate(sockets):
            with sock:
                child_config = self._child_config(index, sock.fileno())
                self._httpservers.append(await self._start(f"httpserver {index}", modules.httpserver, child_config))

    async def start_workers(self) -> None:
        """Start the model workers. Replacements get the KV sizes of the first ones: router and clients rely on them."""
        config = self._config
        if self.engine is not None:
            size, windowed = self.engine.max_total_token_num, self.engine.windowed
            windowed_size = 0 if windowed is None else windowed.size
            worker = replace(config.worker, max_total_token_num=size, max_windowed_token_num=windowed_size)
            config = replace(config, worker=worker)
        module = self._modules.null_worker if config.launch.null_worker else self._modules.worker
        for rank in range(config.worker.tp):
            child_config = ChildConfig(config, self._run_dir, rank, generation=self.generation)
            self.workers.append(await self._start(f"model worker {rank}", module, child_config, WORKER_ENV))
        self.workers[0].show_progress = self._start_display.show  # all ranks do the same at about the same time

    async def wait_ready(self) -> EngineReady:
        """Pass the workers' ready message to the router, then to the HTTP processes, which then accept requests."""
        engine = await self.wait_workers_ready()
        self.router.send(engine)
        for child in self.children:
            await child.ready.wait()
        self._send_httpservers(engine)
        for child in self._httpservers:
            await child.wait_processed()  # otherwise a client that sees "ready" might still get "the model is loading"
        self.engine, self.ready_s = engine, time.monotonic()
        return engine

    async def wait_workers_ready(self) -> EngineReady:
        """Wait for the ready message of every rank. All ranks send the same one. --eos_id replaces its end tokens."""
        for worker in self.workers:
            await worker.ready.wait()
        engine = self.workers[0].engine
        if engine is None:
            raise TypeError("a model worker must send EngineReady, not Ready")
        eos_ids = tuple(self._config.router.eos_id)
        return msgspec.structs.replace(engine, eos_token_ids=eos_ids) if eos_ids else engine

    async def wait_worker_death(self) -> ChildDiedError:
        """Wait until a model worker dies. Return the death that caused it."""
        watching = [asyncio.create_task(worker.watch()) for worker in self.workers]
        try:
            await asyncio.gather(*watching)
        except ChildDiedError as died:
            return await self.root_cause(died)
        finally:
            for task in watching:
                task.cancel()
        raise TypeError("a model worker never sends Drained, so its watch cannot return")

    async def reap_workers(self, timeout_s: float) -> bool:
        """Kill the remaining ranks after one died. Return whether all of them exited in time."""
        socket_paths = [self._child_config().worker_path(rank, self.generation) for rank in range(len(self.workers))]
        self.generation += 1
        self.kill_workers()
        try:
            async with asyncio.timeout(timeout_s):
                for worker in self.workers:
                    await worker.wait()
        except TimeoutError:
            return False
        self.children = [child for child in self.children if child not in self.workers]
        self.workers = []
        for path in (*socket_paths, self._child_config().path("tp")):  # "tp" is the rendezvous file of the ranks
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return True

    def kill_workers(self, reason: str | None = None) -> None:
        for worker in self.workers:
            worker.kill(reason)

    async def root_cause(self, died: ChildDiedError) -> ChildDiedError:
        """The death that caused ``died``: a process that fails because another one died may exit first."""
        if died.exit_code < 0:
            return died
        await asyncio.sleep(EXIT_SETTLE_S)
        others = [ChildDiedError(child, child.exit_code) for child in self.children if child.exit_code]
        killed = [other for other in others if other.exit_code < 0]
        failed = others if died.exit_code == 0 else []  # a worker whose router died exits with code 0
        return next(iter(killed + failed), died)

    async def drain_httpservers(self, *messages: ToChild, timeout_s: float) -> bool:
        """Send ``messages`` to the HTTP processes. Return whether all of them drained in time."""
        self._send_httpservers(*messages)
        try:
            async with asyncio.timeout(timeout_s):
                for child in self._httpservers:
                    if child.exit_code is None:
                        await child.drained.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(FLUSH_S)
        return True

    async def kill_all(self) -> list[ChildProcess]:
        """Kill every process. Return those that did not exit."""
        for child in self.children:
            child.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                for child in self.children:
                    await child.wait()
        return [child for child in self.children if child.exit_code is None]

    def _send_httpservers(self, *messages: ToChild) -> None:
        for child in self._httpservers:
            for message in messages:
                child.send(message)

    def _child_config(self, index: int = 0, listen_fd: int | None = None) -> ChildConfig:
        return ChildConfig(self._config, self._run_dir, index, listen_fd)

    async def _start(
        self, role: str, module: str, child_config: ChildConfig, env: Mapping[str, str] | None = None
    ) -> ChildProcess:
        child = await ChildProcess.start(role, module, child_config, env or {})
        self.children.append(child)
        return child
