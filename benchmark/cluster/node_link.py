"""What the link between two nodes (--nnodes) adds to a step: round trips from the router's socket to a rank's.

    python -m benchmark.cluster.node_link

Both ends of the link and the rank, which echoes, are in this process. So a round trip contains the work of all of them,
and that of no network.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvloop
import zmq
from zmq.utils import z85

from lightserve.cluster.nodes.first_node import FirstNode
from lightserve.cluster.nodes.link import NodeLink
from lightserve.cluster.nodes.streams import READ_BYTES, Endpoint, SocketEndpoint, Target
from lightserve.config.parse import parse_server
from lightserve.ipc.process import ChildConfig
from lightserve.links.curve import AllowedKeys, RateLimitedLog, first_node_socket
from lightserve.links.keys import generate, read_node_key
from lightserve.messages.nodes import NODE_PROTOCOL, NodeHello, StartRank
from lightserve.utils import net
from lightserve.utils.logger import init_logger

MESSAGES = {"64 tokens of a step": (300, 1000), "a prompt of 8,000 tokens": (35_000, 500), "1 MB": (1_000_000, 50)}
HOST = "127.0.0.1"


class Echo:
    """A rank that returns what it gets."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def connect(self, target: Target) -> Callable[[], Awaitable[Endpoint]]:
        return self._start

    async def _start(self) -> Endpoint:
        ours, theirs = socket.socketpair()
        endpoint = SocketEndpoint(*await asyncio.open_connection(sock=ours))
        self.tasks.append(asyncio.create_task(self._run(*await asyncio.open_connection(sock=theirs))))
        return endpoint

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
        writer.close()


async def measure(folder: Path) -> None:
    generate(folder / "keys")
    secret = read_node_key(str(folder / "keys"))
    with net.bind(HOST, 0) as sock:
        port = sock.getsockname()[1]
    place = ("--nnodes=2", f"--master_addr={HOST}", f"--master_port={port}", f"--cluster_keys={folder / 'keys'}")
    child_config = ChildConfig(parse_server(("--tp=2", *place)), str(folder))
    launcher = socket.socket(socket.AF_UNIX)
    launcher.bind(child_config.path("nodes"))
    launcher.listen()
    launcher.setblocking(False)
    allowed = AllowedKeys(frozenset([z85.decode(zmq.curve_public(secret))]), RateLimitedLog(init_logger(__name__)))
    first = FirstNode(child_config, first_node_socket(HOST, port, secret), launcher, {})
    tasks = [asyncio.create_task(work) for work in (allowed.run(), first.run())]
    node = NodeLink((HOST, port), secret, Echo().connect)
    await node.open(NodeHello(NODE_PROTOCOL, 1))
    tasks.append(asyncio.create_task(node.run()))
    control, to_rank = await asyncio.open_unix_connection(child_config.path("nodes"))
    to_rank.write(msgspec.json.encode(StartRank(1, 0, port)) + b"\n-")
    await control.readexactly(1)  # the rank runs
    for name, (size, count) in MESSAGES.items():
        trips = await _round_trips(child_config.worker_path(1, 0), bytes(size), count)
        print(f"{name}: {min(trips) * 1e6:,.0f} us at least, {statistics.median(trips) * 1e6:,.0f} us in the middle")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await node.close()


async def _round_trips(path: str, message: bytes, count: int) -> list[float]:
    reader, writer = await asyncio.open_unix_connection(path)
    trips = []
    for _ in range(count):
        begin_s = time.perf_counter()
        writer.write(message)
        await reader.readexactly(len(message))
        trips.append(time.perf_counter() - begin_s)
    writer.close()
    return trips


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        uvloop.run(measure(Path(folder)))


if __name__ == "__main__":
    main()
