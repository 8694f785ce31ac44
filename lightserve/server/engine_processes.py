"""The processes of one engine: a router and its model workers, one per rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from lightserve.config import ServerConfig
from lightserve.io_struct import EngineReady
from lightserve.server.child_process import ChildDiedError, ChildProcess
from lightserve.utils.process import ChildConfig

if TYPE_CHECKING:
    from lightserve.server.process_group import ProcessGroup

# A worker gets these before it imports torch. OpenMP threads that spin while they wait run 4x slower as soon as another
# process needs a core, which is always the case here; threads that sleep at once run 1.3x slower. So they spin for
# microseconds. NCCL and gloo would listen on the machine's own address; ranks on one machine need only loopback.
WORKER_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


class EngineProcesses:
    router: ChildProcess

    def __init__(self, group: ProcessGroup, config: ServerConfig, run_dir: str) -> None:
        self.workers: list[ChildProcess] = []
        self.generation = 0  # how many times the workers were replaced
        self.ready_s = 0.0  # when all processes of the server were ready
        self.engine: EngineReady | None = None  # from the first workers, once all processes are ready
        self._group = group
        self._config = config
        self._run_dir = run_dir

    async def start_workers(self) -> None:
        """Start the model workers. Replacements get the KV sizes of the first ones: router and clients rely on them."""
        config = self._config
        if self.engine is not None:
            size, windowed = self.engine.max_total_token_num, self.engine.windowed
            windowed_size = 0 if windowed is None else windowed.size
            worker = replace(config.worker, max_total_token_num=size, max_windowed_token_num=windowed_size)
            config = replace(config, worker=worker)
        module = self._group.worker_module
        for rank in range(config.worker.tp):
            child_config = ChildConfig(config, self._run_dir, rank, generation=self.generation)
            self.workers.append(await self._group.start_child(f"model worker {rank}", module, child_config, WORKER_ENV))
        self.workers[0].show_progress = self._group.show_progress  # all ranks do the same at about the same time

    async def start_router(self) -> None:
        self.router = await self._group.start_child("router", self._group.router_module, self._child_config())

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
            return await self._group.root_cause(died)
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
        self._group.children = [child for child in self._group.children if child not in self.workers]
        self.workers = []
        for path in (*socket_paths, self._child_config().path("tp")):  # "tp" is the rendezvous file of the ranks
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return True

    def kill_workers(self, reason: str | None = None) -> None:
        for worker in self.workers:
            worker.kill(reason)

    def _child_config(self) -> ChildConfig:
        return ChildConfig(self._config, self._run_dir)
