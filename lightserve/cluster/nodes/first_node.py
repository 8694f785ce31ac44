"""Node 0's end of the links to the other nodes of a server (--nnodes).

    launcher ── unix socket, one connection for each rank of another node: StartRank, then its control connection
    router ──── unix sockets at the paths where a rank of this machine would listen
                  └─▶ streams of the link to the rank's node

So launcher and router treat a rank of another node like one of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from mmap import ACCESS_READ, mmap

import msgspec

from lightserve.cluster.nodes.arena import ArenaEndpoint
from lightserve.cluster.nodes.properties import difference
from lightserve.cluster.nodes.streams import Endpoint, SocketEndpoint, Streams, Target
from lightserve.config import ServerConfig
from lightserve.ipc.channel import MessageError, make_decoder
from lightserve.ipc.codec import encode
from lightserve.ipc.process import EXIT_CONFIG_ERROR, ChildConfig
from lightserve.links.curve import AsyncSocket, RateLimitedLog, try_send
from lightserve.messages.cluster import Heartbeat
from lightserve.messages.control import ChildFailed, RankExited
from lightserve.messages.nodes import (
    NODE_PROTOCOL,
    ConnectArena,
    ConnectRank,
    ConnectStore,
    NodeAccepted,
    NodeHello,
    NodeRefused,
    OpenStream,
    StartRank,
    ToFirstNode,
    ToNode,
)
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

TICK_S = 0.5
# 10 s; ticks, because a process that was stopped counts none. A closed connection is noticed with the next tick. So
# this is for machines that vanish, and longer than a busy one is silent: all ranks would have to load again.
SILENT_TICKS = 20
QUIET_S = 1.0  # a node that comes so soon is not worth a line in the log
KILLED = -9


class Session:
    """One connection of one node."""

    def __init__(self, node: int, peer: bytes, send: Callable[[ToNode], None]) -> None:
        self.node = node
        self.peer = peer
        self.silent_ticks = 0
        self.streams = Streams(send, first_number=0)


class FirstNode:
    def __init__(
        self, child_config: ChildConfig, from_nodes: AsyncSocket, launcher: socket.socket, properties: dict[str, str]
    ) -> None:
        """``from_nodes``, ``launcher``: sockets that listen."""
        self._child_config = child_config
        self._socket = from_nodes
        self._launcher = launcher
        self._properties = properties
        self._decode = make_decoder(ToFirstNode)
        self._sessions: dict[int, Session] = {}  # by node
        self._by_peer: dict[bytes, Session] = {}
        self._has_joined = asyncio.Condition()
        self._store_ports: dict[int, int] = {}  # by engine
        self._arenas = [mmap(fd, os.fstat(fd).st_size, access=ACCESS_READ) for fd in child_config.arena_fds]
        self._log = RateLimitedLog(logger)
        self._tasks: asyncio.TaskGroup

    @property
    def _config(self) -> ServerConfig:
        return self._child_config.config

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._read())
            self._tasks.create_task(self._watch())
            self._tasks.create_task(self._accept_ranks())

    # the link

    async def _read(self) -> None:
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise MessageError(f"received {len(frames)} frames instead of one")
                self._handle(peer, self._decode(frames[0]))
            except MessageError as error:
                self._refuse(peer, str(error))

    def _handle(self, peer: bytes, message: ToFirstNode) -> None:
        if isinstance(message, NodeHello):
            self._join(peer, message)
            return
        session = self._by_peer.get(peer)
        if session is None:  # it was silent for too long
            self._refuse(peer, "node 0 does not know this connection any more", may_retry=True)
            return
        session.silent_ticks = 0
        if isinstance(message, OpenStream):
            session.streams.accept(message.stream, self._connector(message.target))
        elif not isinstance(message, Heartbeat):
            session.streams.handle(message)

    def _join(self, peer: bytes, hello: NodeHello) -> None:
        nodes = self._config.cluster.nnodes
        if hello.protocol != NODE_PROTOCOL:
            reason = f"node {hello.node} speaks protocol {hello.protocol}, node 0 {NODE_PROTOCOL}"
            self._refuse(peer, f"{reason}; install the same version of LightServe on both")
        elif not 0 < hello.node < nodes:
            self._refuse(peer, f"there are nodes 1 to {nodes - 1} (--nnodes), and no node {hello.node}")
        elif found_difference := difference(hello.node, hello.properties, self._properties):
            self._refuse(peer, f"{found_difference}; start both with the same version, files and flags")
        elif hello.node in self._sessions or peer in self._by_peer:
            self._refuse(peer, f"another process is connected as node {hello.node} (--node_rank)", may_retry=True)
        else:
            session = Session(hello.node, peer, lambda message: self._deliver(session, message))
            self._sessions[hello.node] = self._by_peer[peer] = session
            logger.info("node %d is connected", hello.node)
            self._deliver(session, NodeAccepted())
            self._tasks.create_task(self._notify_joined())

    async def _notify_joined(self) -> None:
        async with self._has_joined:
            self._has_joined.notify_all()

    def _refuse(self, peer: bytes, reason: str, may_retry: bool = False) -> None:
        self._log.warning(f"refused a node: {reason}")
        if peer in self._by_peer:
            self._lose(self._by_peer[peer], f"it sent an invalid message: {reason}")
        try_send(self._socket, [peer, encode(NodeRefused(reason, may_retry))])

    def _deliver(self, session: Session, message: ToNode) -> None:
        if session.peer in self._by_peer and not try_send(self._socket, [session.peer, encode(message)]):
            self._lose(session, "its connection ended")

    def _lose(self, session: Session, reason: str) -> None:
        del self._sessions[session.node], self._by_peer[session.peer]
        logger.warning("node %d is lost: %s", session.node, reason)
        session.streams.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for session in list(self._sessions.values()):
                session.silent_ticks += 1
                if session.silent_ticks > SILENT_TICKS:
                    self._lose(session, f"it sent nothing for {SILENT_TICKS * TICK_S:g} s")
                else:
                    self._deliver(session, Heartbeat())

    def _connector(self, target: Target) -> Callable[[], Awaitable[Endpoint]]:
        if isinstance(target, ConnectStore):
            return partial(self._connect_store, target.engine)
        if isinstance(target, ConnectArena):
            return partial(self._connect_arena, target.engine)
        raise MessageError(f"a node opened a stream for {type(target).__name__}")

    async def _connect_store(self, engine: int) -> Endpoint:
        if engine not in self._store_ports:
            raise ConnectionRefusedError(f"engine {engine} has no store")
        return SocketEndpoint(*await asyncio.open_connection("127.0.0.1", self._store_ports[engine]))

    async def _connect_arena(self, engine: int) -> Endpoint:
        if not 0 <= engine < len(self._arenas):
            raise ConnectionRefusedError("requests have no images")
        return ArenaEndpoint(self._arenas[engine])

    # ranks

    async def _accept_ranks(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._launcher)
            self._tasks.create_task(self._run_rank(*await asyncio.open_unix_connection(sock=connection)))

    async def _run_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From the launcher's StartRank to the end of the rank."""
        endpoint = SocketEndpoint(reader, writer)
        try:
            start = msgspec.json.decode(await reader.readline(), type=StartRank)
            if start.store_port is not None:
                self._store_ports[start.engine] = start.store_port
            node = self._config.node_of(start.rank, start.engine)
            session = await self._session_of(node, reader)
            if session is None:
                await endpoint.write(self._missing(node, reader.at_eof()))
                return
            async with self._listener_for_router(session, ConnectRank(start.rank, start.generation, start.engine)):
                await asyncio.wait({session.streams.open(start, endpoint)})
        except ConnectionError:  # the launcher is about to end
            pass
        finally:
            endpoint.close()

    async def _session_of(self, node: int, launcher: asyncio.StreamReader) -> Session | None:
        """Wait for the node of a rank; None: it has not come in time, or the launcher waits for it no more."""
        cluster = self._config.cluster
        if node in self._sessions:
            return self._sessions[node]
        joining = asyncio.create_task(self._joined(node))
        leaving = asyncio.create_task(_eof(launcher))
        try:
            await asyncio.wait({joining, leaving}, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
            if not (joining.done() or leaving.done()):
                logger.warning(
                    "waiting up to %g s for node %d: start it with --node_rank %d --master_addr %s --master_port %d "
                    "and the same other flags",
                    *(cluster.node_timeout, node, node, cluster.master_addr, cluster.master_port),
                )
                left_s = max(cluster.node_timeout - QUIET_S, 0)
                await asyncio.wait({joining, leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return joining.result() if joining.done() else None
        finally:
            for task in (joining, leaving):
                task.cancel()

    async def _joined(self, node: int) -> Session:
        async with self._has_joined:
            await self._has_joined.wait_for(lambda: node in self._sessions)
        return self._sessions[node]

    def _missing(self, node: int, was_killed: bool) -> bytes:
        cluster = self._config.cluster
        reason = f"node {node} did not connect to {cluster.master_addr}:{cluster.master_port} within"
        text = f"{reason} {cluster.node_timeout:g} s (--node_timeout); start it with --node_rank {node}"
        exited = RankExited(KILLED if was_killed else EXIT_CONFIG_ERROR, is_node_missing=not was_killed)
        return b"".join(msgspec.json.encode(message) + b"\n" for message in (ChildFailed(text), exited))

    @contextlib.asynccontextmanager
    async def _listener_for_router(self, session: Session, target: ConnectRank) -> AsyncIterator[None]:
        of_engine = msgspec.structs.replace(self._child_config, engine=target.engine)
        path = of_engine.worker_path(target.rank, target.generation)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(16)
            listener.setblocking(False)
            accepting = asyncio.create_task(_connect_all(listener, session.streams, target))
            try:
                yield
            finally:
                accepting.cancel()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


async def _connect_all(listener: socket.socket, streams: Streams, target: ConnectRank) -> None:
    """In the order of the connections: a rank knows by it what each of them is for."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        streams.open(target, SocketEndpoint(*await asyncio.open_unix_connection(sock=connection)))


async def _eof(reader: asyncio.StreamReader) -> None:
    """The launcher sends pings only to ranks that are ready, so nothing that is read here is missing later."""
    while not reader.at_eof():
        await reader.read(1)
