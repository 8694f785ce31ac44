"""The router's end of the rpyc connections to the model workers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import rpyc
from rpyc.core.channel import Channel
from rpyc.utils.factory import connect_channel

from lightserve.router.loop_stream import LoopStream

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "include_local_version": False}
CONNECT_S = 30.0  # a worker that listens answers at once; one that takes so long hangs


class RankConnection(NamedTuple):
    """A connection to a rank, for one method of its worker."""

    connection: Any
    fileno: int  # a lost connection has none
    call: Any  # the method: it sends the command, and returns a reply that comes later


RankConnections = Mapping[str, Sequence[RankConnection]]  # to all ranks, by method


async def connect_ranks(socket_paths: Sequence[str], methods: Sequence[str]) -> RankConnections:
    """Workers accept connections in the order of ``methods``.

    Raises TimeoutError if a worker accepts and does not answer.
    """
    loop = asyncio.get_running_loop()
    handshakes = [_Handshake(path, methods, loop) for path in socket_paths]
    executor = ThreadPoolExecutor(len(handshakes), thread_name_prefix="connect")
    ranks = [loop.run_in_executor(executor, handshake.run) for handshake in handshakes]
    executor.shutdown(wait=False)
    await asyncio.wait(ranks, timeout=CONNECT_S, return_when=asyncio.FIRST_EXCEPTION)
    error = _first_error(ranks)
    while not all(rank.done() for rank in ranks):
        for handshake in handshakes:
            handshake.end()  # again: it may just have begun the next connection
        await asyncio.wait(ranks, timeout=0.1)
    await asyncio.gather(*ranks, return_exceptions=True)
    if error is not None:
        close_all(loop, [rank for handshake in handshakes for rank in handshake.connected])
        raise error
    return {name: [handshake.connected[at] for handshake in handshakes] for at, name in enumerate(methods)}


def _first_error(ranks: Sequence[asyncio.Future[None]]) -> BaseException | None:
    for rank in ranks:
        if rank.done() and (error := rank.exception()) is not None:
            return error
    hanging = next((number for number, rank in enumerate(ranks) if not rank.done()), None)
    return None if hanging is None else TimeoutError(f"model worker {hanging} did not answer within {CONNECT_S:g} s")


def close_all(loop: asyncio.AbstractEventLoop, ranks: Iterable[RankConnection]) -> None:
    """Close connections, and stop reading them.

    The sockets close first: rpyc's own close waits for a response, which a worker that hangs never sends.
    """
    for connection, fileno, _ in ranks:
        if not connection.closed:
            if not connection._channel.closed:
                loop.remove_reader(fileno)
                connection._channel.close()
            connection.close()


class _Handshake:
    """Connects to one rank, in a thread: rpyc waits for the answers of the worker."""

    def __init__(self, path: str, methods: Sequence[str], loop: asyncio.AbstractEventLoop) -> None:
        self.connected: list[RankConnection] = []
        self._path = path
        self._methods = methods
        self._loop = loop
        self._waiting: socket.socket | None = None  # for an answer of the worker

    def run(self) -> None:
        for method in self._methods:
            self.connected.append(self._connect(method))

    def end(self) -> None:
        """Make ``run`` fail, if it waits for an answer."""
        if (sock := self._waiting) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _connect(self, method: str) -> RankConnection:
        """Without compression: rpyc would spend 1.5 ms on the step of an 8,000-token prompt, and some on large batches.

        The root of a connection and its method are asked for here, and nothing is waited for later.
        """
        sock = self._waiting = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self._path)
            connection = connect_channel(Channel(LoopStream(sock, self._loop), compress=False), config=RPYC_CONFIG)
            rank = RankConnection(connection, sock.fileno(), rpyc.async_(getattr(connection.root, method)))
        except BaseException:
            sock.close()
            raise
        self._waiting = None
        return rank
