"""The launcher of a node that is not the first (--node_rank): it starts ranks, and node 0 does the rest.

connect to node 0 ─▶ introduce this node ─▶ start ranks, and connect the router of node 0 with them ─▶ link is lost
        ▲                                                                                                   │
        └──────────────────────────── kill all ranks, wait until they have exited ◀─────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio.subprocess import Process
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from lightserve.cluster.nodes.link import NodeLink, NodeRefusedError
from lightserve.cluster.nodes.properties import node_properties
from lightserve.cluster.nodes.streams import READ_BYTES, Endpoint, SocketEndpoint, Target
from lightserve.config import ServerConfig
from lightserve.errors import ServerError
from lightserve.ipc.channel import MessageError
from lightserve.ipc.process import ChildConfig
from lightserve.links.gateway_link import LinkLostError
from lightserve.links.keys import read_node_key
from lightserve.messages.control import RankExited
from lightserve.messages.nodes import NODE_PROTOCOL, ConnectArena, ConnectRank, ConnectStore, NodeHello, StartRank
from lightserve.server.banner import print_error, print_line
from lightserve.server.child_process import EXIT_GRACE_S, json_line, kill_group, spawn
from lightserve.server.engine_processes import worker_env
from lightserve.server.process_group import Modules
from lightserve.server.run_directory import run_directory
from lightserve.server.shutdown import ENDED, stop_signals
from lightserve.server.supervisor import REAP_TIMEOUT_S

RETRY_S = 0.5
ARENA_SOCKET = "arena"  # where ranks connect to the embeddings of images, which are on node 0


class RankEndpoint:
    """A rank's control connection. The end of the stream kills the rank, and its exit ends the stream."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._has_ended = False

    async def read(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            if data := await self._reader.read(READ_BYTES):
                return data
        if self._has_ended:
            return b""
        self._has_ended = True
        return json_line(RankExited(await self._exit_code()))

    async def write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it is exiting: ``read`` reports that
            self._writer.write(data)
            await self._writer.drain()

    def end(self) -> None:
        kill_group(self.process)

    def close(self) -> None:
        kill_group(self.process)
        self._writer.close()

    async def _exit_code(self) -> int:
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                return await self.process.wait()
        except TimeoutError:
            kill_group(self.process)
            return await self.process.wait()


class NodeHost:
    def __init__(self, config: ServerConfig, modules: Modules) -> None:
        self._config = config
        self._run_dir = ""  # of the present link: another node 0 counts its ranks' generations from 0 again
        self._module = modules.null_worker if config.launch.null_worker else modules.worker
        self._env = worker_env(config)
        self._processes: list[Process] = []
        self._orders: defaultdict[ConnectRank, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._link: NodeLink | None = None
        self._store_ports: list[int] = []  # by engine

    async def run(self) -> None:
        """Until node 0 refuses this node or is away for too long: a ServerError."""
        cluster = self._config.cluster
        properties = await asyncio.to_thread(node_properties, self._config)
        hello = NodeHello(NODE_PROTOCOL, cluster.node_rank, properties)
        async with contextlib.AsyncExitStack() as exits:
            for engine in range(cluster.dp):
                store = await asyncio.start_server(partial(self._relay, ConnectStore(engine)), "127.0.0.1", 0)
                self._store_ports.append(store.sockets[0].getsockname()[1])
                await exits.enter_async_context(store)
            while True:
                await self._connect(hello)
                with run_directory() as self._run_dir:
                    await self._serve()

    async def _serve(self) -> None:
        """Until node 0 is lost."""
        async with contextlib.AsyncExitStack() as exits:
            for engine in range(self._config.cluster.dp):
                relay, path = partial(self._relay, ConnectArena(engine)), self._arena_path(engine)
                await exits.enter_async_context(await asyncio.start_unix_server(relay, path))
            await self._run_link()

    async def _run_link(self) -> None:
        assert self._link is not None
        try:
            await self._link.run()
        except (LinkLostError, NodeRefusedError) as error:
            print_error(f"node 0 is lost ({error}); the ranks of this node end")
        finally:
            await self._stop()

    async def _stop(self) -> None:
        """End the link and all ranks. New ones start only after the old ones have exited."""
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()
        for process in self._processes:
            kill_group(process)
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                for process in self._processes:
                    await process.wait()
        except TimeoutError as error:
            raise ServerError(f"a killed model worker did not exit within {REAP_TIMEOUT_S:.0f} s") from error
        self._processes.clear()
        self._orders.clear()

    async def _connect(self, hello: NodeHello) -> None:
        """Ask again and again for --node_timeout."""
        cluster = self._config.cluster
        where = f"node 0 at {cluster.master_addr}:{cluster.master_port}"
        end_s, last = time.monotonic() + cluster.node_timeout, ""
        secret = read_node_key(cluster.cluster_keys or "")
        while True:
            self._link = NodeLink((cluster.master_addr or "", cluster.master_port), secret, self._connector)
            try:
                await self._link.open(hello)
                print_line(f"node {cluster.node_rank} of {cluster.nnodes} is connected to {where}")
                return
            except NodeRefusedError as error:
                await self._link.close()
                raise ServerError(f"{where} refuses this node: {error}") from error
            except LinkLostError as error:
                reason = str(error)
            await self._link.close()
            if time.monotonic() > end_s:
                failure = f"{where} was not there for {cluster.node_timeout:g} s (--node_timeout): {reason}"
                raise ServerError(f"{failure}; start it with --node_rank 0")
            if reason != last:
                print_line(f"waiting up to {cluster.node_timeout:g} s for {where}: {reason}")
            last = reason
            await asyncio.sleep(RETRY_S)

    def _connector(self, target: Target) -> Callable[[], Awaitable[Endpoint]]:
        match target:
            case StartRank():
                if self._config.node_of(target.rank, target.engine) != self._config.cluster.node_rank:
                    raise MessageError(f"rank {target.rank} of engine {target.engine} is not on this node")
                return lambda: self._start(target)
            case ConnectRank():
                return lambda: self._connect_rank(target)
            case ConnectStore() | ConnectArena():
                raise MessageError("the store and the arena are on node 0")

    async def _start(self, start: StartRank) -> Endpoint:
        config = self._config
        worker = config.worker
        if start.max_total_token_num is not None:  # a replacement
            worker = replace(
                worker,
                max_total_token_num=start.max_total_token_num,
                max_windowed_token_num=start.max_windowed_token_num,
                max_state_rows=start.max_state_rows,
            )
        child_config = ChildConfig(
            replace(config, worker=worker),
            self._run_dir,
            index=start.rank,
            generation=start.generation,
            engine=start.engine,
            store_port=None if start.store_port is None else self._store_ports[start.engine],
            arena_path=self._arena_path(start.engine) if start.has_images else None,
        )
        of_engine = f" of engine {start.engine}" if config.cluster.dp > 1 else ""
        print_line(f"starting model worker {start.rank}{of_engine}")
        process, reader, writer = await spawn(self._module, child_config, self._env)
        self._processes = [running for running in self._processes if running.returncode is None] + [process]
        return RankEndpoint(process, reader, writer)

    async def _connect_rank(self, target: ConnectRank) -> Endpoint:
        """One after the other: a rank knows by their order what its connections are for."""
        child_config = ChildConfig(self._config, self._run_dir, engine=target.engine)
        path = child_config.worker_path(target.rank, target.generation)
        async with self._orders[target]:
            return SocketEndpoint(*await asyncio.open_unix_connection(path))

    def _arena_path(self, engine: int) -> str:
        return f"{self._run_dir}/{ARENA_SOCKET}-{engine}"

    def _relay(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A rank connects to something that is on node 0."""
        if self._link is None:
            writer.close()
        else:
            self._link.streams.open(target, SocketEndpoint(reader, writer))


async def run_node(config: ServerConfig, modules: Modules) -> int:
    """Serve ranks until a signal or a ServerError. Returns the exit code."""
    signals = stop_signals()
    serving = asyncio.create_task(NodeHost(config, modules).run())
    stopping = asyncio.create_task(signals.get())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, stopping):
        task.cancel()
    (error,) = await asyncio.gather(serving, return_exceptions=True)
    if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
        raise error
    print_line(ENDED)
    return 0
