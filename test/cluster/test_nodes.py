"""The links between the nodes of an engine: streams of bytes that nobody else can open, and what they refuse."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils import z85

from lightserve.cluster.nodes import link as link_module, streams as streams_module
from lightserve.cluster.nodes.first_node import FirstNode
from lightserve.cluster.nodes.link import NodeLink, NodeRefusedError
from lightserve.cluster.nodes.properties import difference
from lightserve.cluster.nodes.streams import Endpoint, SocketEndpoint, Streams, Target
from lightserve.config.parse import parse_server
from lightserve.ipc.channel import MessageError
from lightserve.ipc.process import ChildConfig
from lightserve.links.curve import (
    MAX_NODE_MESSAGE_BYTES,
    AllowedKeys,
    RateLimitedLog,
    first_node_socket,
    gateway_socket,
)
from lightserve.links.gateway_link import LinkLostError
from lightserve.links.keys import generate, read_node_key
from lightserve.messages.control import FromChild, RankExited
from lightserve.messages.nodes import (
    NODE_PROTOCOL,
    ConnectRank,
    ConnectStore,
    NodeHello,
    OpenStream,
    StartRank,
    StreamData,
    StreamEnd,
    StreamMessage,
)
from lightserve.utils.logger import init_logger
from test.ports import free_port
from test.waiting import DEADLINE_S, until

PROPERTIES = {"LightServe": "1", "--tp": "2"}
HELLO = NodeHello(NODE_PROTOCOL, 1, PROPERTIES)
LARGE = os.urandom(3_000_000)
logger = init_logger("lightserve.test")


async def local_pair() -> tuple[SocketEndpoint, asyncio.StreamReader, asyncio.StreamWriter]:
    """An endpoint, and the program at its other end."""
    ours, theirs = socket.socketpair()
    endpoint = SocketEndpoint(*await asyncio.open_connection(sock=ours))
    return endpoint, *await asyncio.open_connection(sock=theirs)


class Pair:
    """Two sides of a link. The second one echoes all that it gets."""

    def __init__(self) -> None:
        self.sides: list[Streams] = []
        self.sides = [Streams(self._to(1), 0), Streams(self._to(0), 1)]
        self.connect: Callable[[], Awaitable[Endpoint]] = self._echo
        self.echoed = 0
        self._tasks: list[asyncio.Task[None]] = []

    def _to(self, side: int) -> Callable[[StreamMessage], None]:
        def send(message: StreamMessage) -> None:
            if isinstance(message, OpenStream):
                self.sides[side].accept(message.stream, self.connect)
            else:
                self.sides[side].handle(message)

        return send

    async def _echo(self) -> Endpoint:
        endpoint, reader, writer = await local_pair()
        self._tasks.append(asyncio.create_task(self._run_echo(reader, writer)))
        return endpoint

    async def _run_echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            self.echoed += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


def run(scenario: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(limited())


def test_a_stream_carries_all_bytes_both_ways_and_ends_with_its_ends() -> None:
    async def scenario() -> None:
        pair = Pair()
        endpoint, reader, writer = await local_pair()
        stream = pair.sides[0].open(ConnectStore(), endpoint)
        writer.write(LARGE)
        writer.write_eof()

        assert await reader.read(-1) == LARGE
        await stream
        await until(lambda: not any(side._streams for side in pair.sides))

    run(scenario())


def test_a_target_that_is_gone_ends_the_stream() -> None:
    async def refuse() -> Endpoint:
        raise ConnectionRefusedError

    async def scenario() -> None:
        pair = Pair()
        pair.connect = refuse
        endpoint, reader, _ = await local_pair()
        pair.sides[0].open(ConnectStore(), endpoint)

        assert await reader.read(-1) == b""

    run(scenario())


def test_a_side_that_does_not_read_loses_the_stream_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> Endpoint:
        await asyncio.Event().wait()
        raise ConnectionError

    async def scenario() -> None:
        monkeypatch.setattr(streams_module, "MAX_UNREAD_BYTES", 100_000)
        pair = Pair()
        pair.connect = never
        endpoint, reader, writer = await local_pair()
        pair.sides[0].open(ConnectStore(), endpoint)
        with suppress(ConnectionError):
            writer.write(LARGE)
            await writer.drain()
            assert await reader.read(-1) == b""
        assert not pair.sides[1]._streams

    run(scenario())


def test_a_closed_link_closes_the_local_ends() -> None:
    async def scenario() -> None:
        pair = Pair()
        endpoint, reader, writer = await local_pair()
        pair.sides[0].open(ConnectStore(), endpoint)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        pair.sides[0].open(ConnectStore(), (await local_pair())[0])  # its task has not begun
        for side in pair.sides:
            await side.close()

        assert await reader.read(-1) == b""
        endpoint, reader, _ = await local_pair()
        await pair.sides[0].open(ConnectStore(), endpoint)  # it comes too late
        assert await reader.read(-1) == b""

    run(scenario())


@pytest.mark.parametrize("number", [0, 2, 1])
def test_a_stream_number_that_the_other_side_must_not_use_is_refused(number: int) -> None:
    async def scenario() -> None:
        side = Streams(lambda message: None, first_number=0)
        pair = Pair()
        if number == 1:
            side.accept(1, pair.connect)
        with pytest.raises(MessageError):
            side.accept(number, pair.connect)
        side.handle(StreamData(77, b"of a stream that was closed"))
        side.handle(StreamEnd(77))
        await side.close()

    run(scenario())


class Link:
    """A real node 0, and nodes with what they want to be."""

    def __init__(self, folder: Path, arena_fd: int | None) -> None:
        self.folder = folder
        generate(folder / "keys")
        self.secret = read_node_key(str(folder / "keys"))
        self.port = free_port()
        log = RateLimitedLog(logger)
        self.allowed = AllowedKeys(frozenset([z85.decode(zmq.curve_public(self.secret))]), log, "node.secret")
        place = ("--nnodes=2", "--master_addr=127.0.0.1", f"--cluster_keys={folder / 'keys'}", "--node_timeout=1")
        config = parse_server(("--tp=2", *place))
        self.child_config = ChildConfig(config, str(folder), arena_fds=() if arena_fd is None else (arena_fd,))
        self.launcher = socket.socket(socket.AF_UNIX)
        self.launcher.bind(str(folder / "nodes"))
        self.launcher.listen()
        self.launcher.setblocking(False)
        self.socket = first_node_socket("127.0.0.1", self.port, self.secret)
        self.first = FirstNode(self.child_config, self.socket, self.launcher, PROPERTIES)
        self.targets: list[Target] = []
        self.links: list[NodeLink] = []

    def node(self, secret: bytes | None = None) -> NodeLink:
        link = NodeLink(("127.0.0.1", self.port), secret or self.secret, self._connect)
        self.links.append(link)
        return link

    def _connect(self, target: Target) -> Callable[[], Awaitable[Endpoint]]:
        self.targets.append(target)
        return Pair()._echo

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        self.socket.close(linger=0)
        self.launcher.close()
        self.allowed.close()


def check(folder: Path, scenario: Callable[[Link], Awaitable[None]], arena_fd: int | None = None) -> None:
    async def run_scenario() -> None:
        link = Link(folder, arena_fd)
        tasks = [asyncio.create_task(work) for work in (link.allowed.run(), link.first.run())]
        try:
            await scenario(link)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await link.close()

    run(run_scenario())


@pytest.mark.parametrize(
    ("hello", "found"),
    [
        (NodeHello(99, 1), "node 1 speaks protocol 99, node 0 3; install the same version"),
        (NodeHello(NODE_PROTOCOL, 2, PROPERTIES), "there are nodes 1 to 1"),
        (NodeHello(NODE_PROTOCOL, 0, PROPERTIES), "and no node 0"),
        (NodeHello(NODE_PROTOCOL, 1, PROPERTIES | {"LightServe": "2"}), "LightServe is 2 there, and 1 on node 0"),
        (NodeHello(NODE_PROTOCOL, 1, {"LightServe": "1"}), "--tp is nothing there, and 2 on node 0"),
        (NodeHello(NODE_PROTOCOL, 1, PROPERTIES | {"--new": "1"}), "--new is 1 there, and nothing on node 0"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, hello: NodeHello, found: str) -> None:
    async def scenario(link: Link) -> None:
        with pytest.raises(NodeRefusedError, match=found):
            await link.node().open(hello)
        await link.node().open(HELLO)  # the right one is accepted

    check(tmp_path, scenario)


def test_a_stranger_gets_no_answer(tmp_path: Path) -> None:
    async def scenario(link: Link) -> None:
        generate(tmp_path / "others")
        with pytest.raises(LinkLostError, match="another key"):
            await link.node(read_node_key(str(tmp_path / "others"))).open(HELLO)
        await link.node().open(HELLO)

    check(tmp_path, scenario)


def test_the_public_key_of_node_0_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(link: Link) -> None:
        own_secret, known = zmq.curve_keypair()[1], zmq.curve_public(link.secret)
        with monkeypatch.context() as patched:
            patched.setattr(link_module, "node_socket", lambda secret: gateway_socket(own_secret, known))
            stranger = link.node()
        with pytest.raises(LinkLostError, match="does not accept the key"):
            await stranger.open(HELLO)
        await link.node().open(HELLO)

    check(tmp_path, scenario)


def test_a_second_process_for_a_node_is_refused_until_the_first_one_is_gone(tmp_path: Path) -> None:
    async def scenario(link: Link) -> None:
        first = link.node()
        await first.open(HELLO)
        with pytest.raises(LinkLostError, match="another process is connected as node 1"):
            await link.node().open(HELLO)
        await first.close()
        await until(lambda: not link.first._sessions)
        await link.node().open(HELLO)

    check(tmp_path, scenario)


@pytest.mark.parametrize("target", [StartRank(1, 0, 1), ConnectRank(1, 0)])
def test_a_node_may_open_streams_to_the_store_and_the_arena_only(tmp_path: Path, target: Target) -> None:
    async def scenario(link: Link) -> None:
        node = link.node()
        await node.open(HELLO)
        node.streams.open(target, (await local_pair())[0])
        with pytest.raises((NodeRefusedError, LinkLostError), match=f"a stream for {type(target).__name__}"):
            await node.run()

    check(tmp_path, scenario)


@pytest.mark.parametrize("size", [10, MAX_NODE_MESSAGE_BYTES + 1])
def test_noise_or_a_huge_message_of_a_node_ends_its_connection_only(tmp_path: Path, size: int) -> None:
    async def scenario(link: Link) -> None:
        node = link.node()
        await node.open(HELLO)
        await node._socket.send(b"\xc1" * size)
        with pytest.raises((NodeRefusedError, LinkLostError)):
            await node.run()
        await until(lambda: not link.first._sessions)
        await link.node().open(HELLO)

    check(tmp_path, scenario)


async def start_rank(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(link.child_config.path("nodes"))
    writer.write(msgspec.json.encode(StartRank(1, 3, 5)) + b"\n")
    return reader, writer


def test_connections_of_the_router_reach_the_rank_in_their_order(tmp_path: Path) -> None:
    async def scenario(link: Link) -> None:
        node = link.node()
        await node.open(HELLO)
        running = asyncio.create_task(node.run())
        reader, writer = await start_rank(link)
        writer.write(b"to the rank")
        assert await reader.readexactly(11) == b"to the rank"
        path = link.child_config.worker_path(1, 3)
        for count in range(1, 6):
            router, to_rank = await asyncio.open_unix_connection(path)
            to_rank.write(b"step")
            assert await router.readexactly(4) == b"step"
            assert link.targets == [StartRank(1, 3, 5), *[ConnectRank(1, 3)] * count]
        writer.write_eof()  # kill it
        assert await reader.read(-1) == b""
        await until(lambda: not Path(path).exists())
        running.cancel()

    check(tmp_path, scenario)


def test_a_node_that_never_comes_ends_the_rank_with_a_reason(tmp_path: Path) -> None:
    async def scenario(link: Link) -> None:
        reader, _ = await start_rank(link)
        failed, exited = [msgspec.json.decode(line, type=FromChild) for line in (await reader.read(-1)).splitlines()]
        assert "node 1 did not connect to 127.0.0.1:28765 within 1 s (--node_timeout)" in failed.message
        assert exited == RankExited(2, is_node_missing=True)

    check(tmp_path, scenario)


def test_a_launcher_that_ends_does_not_wait_for_a_node(tmp_path: Path) -> None:
    async def scenario(link: Link) -> None:
        reader, writer = await start_rank(link)
        writer.write_eof()
        assert RankExited(-9) in [
            msgspec.json.decode(line, type=FromChild) for line in (await reader.read(-1)).splitlines()
        ]

    check(tmp_path, scenario)


def test_properties_that_are_equal_have_no_difference() -> None:
    assert difference(1, PROPERTIES, dict(PROPERTIES)) is None
