"""The processes of one engine: a router, its model workers, one per rank, and encoders if requests have images."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from lightserve.config import ServerConfig, WorkerConfig
from lightserve.ipc.process import ChildConfig
from lightserve.messages.control import EngineInfo, StateKv
from lightserve.messages.nodes import StartRank
from lightserve.server.child_process import ChildDiedError, ChildProcess
from lightserve.server.images import has_own_memory, open_arena
from lightserve.server.remote_rank import RemoteRank
from lightserve.utils import net
from lightserve.utils.cpu import available_cores

if TYPE_CHECKING:
    from lightserve.server.process_group import ProcessGroup

# A worker gets these before it imports torch. OpenMP threads that spin while they wait run 4x slower as soon as another
# process needs a core, which is always the case here; threads that sleep at once run 1.3x slower. So they spin for
# microseconds. NCCL and gloo would listen on the machine's own address; ranks on one machine need only loopback, and
# those on several nodes only the network of --master_addr.
WORKER_ENV = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}

NODES_SOCKET = "nodes"  # where the nodes process listens for the launcher
STORE_BACKLOG = 128  # each rank has a few connections


def worker_env(config: ServerConfig) -> dict[str, str]:
    """Engines and stages share the cores: threads of all of them at once would wait for one another."""
    env, parts = dict(WORKER_ENV), config.num_cpu_parts
    if parts > 1:
        env["OMP_NUM_THREADS"] = str(max(available_cores() // parts, 1))
    if config.cluster.nnodes > 1:
        interface = net.interface_to(config.cluster.master_addr or "")
        env |= {} if interface is None else {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return env


class EngineProcesses:
    router: ChildProcess

    def __init__(self, group: ProcessGroup, config: ServerConfig, run_dir: str, index: int = 0) -> None:
        self.index = index  # among the engines of --dp
        self.epoch = 0  # how many times the router was replaced
        self.workers: list[ChildProcess] = []
        self.generation = 0  # how many times the workers were replaced
        self.ready_s = 0.0  # when all processes of the server were ready
        self.engine: EngineInfo | None = None  # from the first workers, once all processes are ready
        self.encoders: list[ChildProcess] = []  # none: requests have no images
        self._arena_fd: int | None = None  # None: the same
        self._encoder_fd: int | None = None  # see ChildConfig
        self.stopped_encoders: set[int] = set()  # with their router: they have not failed
        self._encoder_generations: list[int] = []  # of each, how many times it was replaced
        self._has_router = asyncio.Event()
        self._group = group
        self._config = config
        self._run_dir = run_dir

    @property
    def node_timeout_s(self) -> float:
        """How long new workers may wait for another node."""
        cluster = self._config.cluster
        return cluster.node_timeout if cluster.nnodes > 1 else 0.0

    @property
    def is_node_missing(self) -> bool:
        """A node did not come in time: it is no use to wait for it again."""
        return any(worker.is_node_missing for worker in self.workers)

    def use_arena(self, fd: int) -> None:
        """Before the workers: memory with the embeddings of images, which somebody else encodes."""
        self._arena_fd = fd

    def open_arena(self) -> int:
        """The same, for the encoders of this engine."""
        self._arena_fd = open_arena(self._config.worker.embed_cache_gb)
        return self._arena_fd

    async def start_first_encoders(self) -> None:
        """Before the workers: on a GPU they wait until these have their memory, and take what is left."""
        self._encoder_generations = [0] * self._config.worker.visual_dp
        end_of_encoders = None
        if has_own_memory(self._config.worker.device):
            self._encoder_fd, end_of_encoders = os.pipe()
        try:
            for index in range(len(self._encoder_generations)):
                self.encoders.append(await self._start_encoder(index, end_of_encoders))
        finally:
            if end_of_encoders is not None:
                os.close(end_of_encoders)

    async def replace_encoder(self, index: int) -> None:
        """Start another encoder in place of one that has exited. The router sends it what that one had."""
        await self.encoders[index].wait()
        self._group.children.remove(self.encoders[index])
        self._encoder_generations[index] += 1
        await self._has_router.wait()
        self.encoders[index] = await self._start_encoder(index)

    async def _start_encoder(self, index: int, pipe_fd: int | None = None) -> ChildProcess:
        base, generation = self._child_config(), self._encoder_generations[index]
        config = msgspec.structs.replace(base, index=index, generation=generation, encoder_fd=pipe_fd)
        self.stopped_encoders.discard(index)
        role = self._role(f"encoder {index}" if len(self._encoder_generations) > 1 else "encoder")
        return await self._group.start_child(role, self._group.encoder_module, config, worker_env(self._config))

    async def start_workers(self) -> None:
        """Start the model workers. Replacements get the KV sizes of the first ones: router and clients rely on them."""
        config = self._config
        if self.engine is not None:
            config = replace(config, worker=_with_sizes(config.worker, self.engine))
        with contextlib.ExitStack() as exits:
            store = exits.enter_context(_store_socket()) if config.has_divided_engines else None
            for rank in range(config.worker.num_ranks):
                if config.node_of(rank, self.index) > 0:
                    await self._start_remote(config, rank, store)
                else:
                    await self._start_local(config, rank, store)
        if self.index == 0:  # all workers do the same at about the same time
            self.workers[0].show_progress = self._group.show_progress

    async def _start_local(self, config: ServerConfig, rank: int, store: socket.socket | None) -> None:
        base = self._child_config()
        child_config = msgspec.structs.replace(base, config=config, index=rank, encoder_fd=self._encoder_fd)
        if store is not None:
            listen_fd = store.fileno() if rank == 0 else None
            port = store.getsockname()[1]
            child_config = msgspec.structs.replace(child_config, listen_fd=listen_fd, store_port=port)
        role = self._role(f"model worker {rank}")
        module = self._group.worker_module
        self.workers.append(await self._group.start_child(role, module, child_config, worker_env(config)))

    async def _start_remote(self, config: ServerConfig, rank: int, store: socket.socket | None) -> None:
        has_images, port = self._arena_fd is not None, None if store is None else store.getsockname()[1]
        start = StartRank(rank, self.generation, port, self.index, has_images=has_images)
        if self.engine is not None:  # a replacement
            start = msgspec.structs.replace(
                start,
                max_total_token_num=config.worker.max_total_token_num,
                max_windowed_token_num=config.worker.max_windowed_token_num,
                max_state_rows=config.worker.max_state_rows,
            )
        node = config.node_of(rank, self.index)
        role = self._role(f"model worker {rank} on node {node}")
        worker = await RemoteRank.start_at(self._child_config().path(NODES_SOCKET), role, node, start)
        self._group.children.append(worker)
        self.workers.append(worker)

    async def start_router(self) -> None:
        role = self._role("router")
        self.router = await self._group.start_child(role, self._group.router_module, self._child_config())
        self._has_router.set()

    async def stop(self, timeout_s: float) -> bool:
        """Kill the router and its workers. Returns whether they exited in time.

        The encoders go too: they may be writing to memory that the next router gives to other images.
        """
        self._has_router.clear()
        self.router.kill()
        self.stopped_encoders.update(range(len(self.encoders)))
        for encoder in self.encoders:
            encoder.kill("its router died")
        if not await self.reap_workers(timeout_s):
            return False
        await self.router.wait()
        self._group.children.remove(self.router)
        child_config = self._child_config()
        for address in (child_config.to_engine, child_config.from_engine):  # ZMQ leaves the files of its sockets
            _unlink(address(self.index, self.epoch).removeprefix("ipc://"))
        return True

    async def restart(self, timeout_s: float) -> bool:
        """Replace the router and its workers; their supervisors replace the encoders.

        Returns whether the old ones exited in time.
        """
        if not await self.stop(timeout_s):
            return False
        self.epoch += 1
        await self.start_workers()
        await self.start_router()
        return True

    async def wait_ready(self) -> EngineInfo:
        """Wait until workers and router are ready for requests."""
        engine = await self.wait_workers_ready()
        self.router.send(engine)
        await self.router.ready.wait()
        return engine

    async def wait_workers_ready(self) -> EngineInfo:
        """Wait for the ready message of every rank. All ranks send the same one. --eos_id replaces its end tokens."""
        for worker in self.workers:
            await worker.ready.wait()
        engine = self.workers[0].engine
        if engine is None:
            raise TypeError("a model worker must send EngineInfo, not Ready")
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
        child_config, ranks = self._child_config(), range(len(self.workers))
        socket_paths = [child_config.worker_path(rank, self.generation) for rank in ranks]
        socket_paths.append(child_config.rendezvous_path)
        if child_config.role == "decode":
            addresses = [child_config.kv_address(rank, self.generation) for rank in ranks]
            socket_paths += [address.removeprefix("unix://") for address in addresses if address.startswith("unix://")]
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
        for path in socket_paths:
            _unlink(path)
        return True

    def kill_workers(self, reason: str | None = None) -> None:
        for worker in self.workers:
            worker.kill(reason)

    def _role(self, role: str) -> str:
        return f"{role} of engine {self.index}" if self._config.cluster.dp > 1 else role

    def _child_config(self) -> ChildConfig:
        return ChildConfig(
            self._config,
            self._run_dir,
            generation=self.generation,
            engine=self.index,
            epoch=self.epoch,
            arena_fd=self._arena_fd,
        )


def _with_sizes(config: WorkerConfig, engine: EngineInfo) -> WorkerConfig:
    """The memory of the first workers."""
    states = [group.size for group in engine.kv_groups if isinstance(group, StateKv)]
    windows = [group.size for group in engine.kv_groups if not isinstance(group, StateKv)]
    return replace(
        config,
        max_total_token_num=engine.max_total_token_num,
        max_windowed_token_num=sum(windows),
        max_state_rows=sum(states) or None,
    )


def _store_socket() -> socket.socket:
    """Where the ranks of several nodes find each other. The nodes process brings those of other nodes here."""
    store = socket.socket()
    store.bind(("127.0.0.1", 0))
    store.listen(STORE_BACKLOG)
    return store


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
