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
from rpyc.core.stream import SocketStream
from rpyc.utils.factory import connect_channel

from lightserve.ipc.worker_calls import RUN

RPYC_CONFIG = {"allow_pickle": False, "sync_request_timeout": None, "include_local_version": False}
CONNECT_S = 30.0  # a worker that listens answers at once; one that takes so long hangs


class LoopStream(SocketStream):  # type: ignore[misc]  # rpyc is untyped
    """Keeps what the socket does not take at once; the event loop sends it as soon as there is room.

    A worker does not read while it launches a step, and the step of a long prompt is larger than a socket's buffer.
    rpyc would block the router until then, and would count the worker as lost after the timeout for connecting.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.settimeout(None)  # rpyc's timeout is for connecting; sends do not block, reads happen when data is there
        super().__init__(sock)
        self._loop = loop
        self._unsent = b""

    def write(self, data: bytes) -> None:
        if self._unsent:  # keeps the order
            self._unsent += data
            return
        try:
            self._unsent = data[self._send(data) :]
        except OSError as error:
            self.close()
            raise EOFError(error) from error
        if self._unsent:
            self._loop.add_writer(self.sock.fileno(), self._send_rest)

    def close(self) -> None:
        self._discard_rest()
        super().close()

    def _send_rest(self) -> None:
        try:
            rest = self._unsent[self._send(self._unsent) :]
        except OSError:  # the reader of this connection notices the error too, and handles it
            rest = b""
        if rest:
            self._unsent = rest
        else:
            self._discard_rest()

    def _discard_rest(self) -> None:
        if self._unsent:
            self._loop.remove_writer(self.sock.fileno())
            self._unsent = b""

    def _send(self, data: bytes) -> int:
        """Returns how many bytes the socket took."""
        try:
            sent: int = self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        return sent


class RankConnection(NamedTuple):
    """A connection to a rank, for one call of worker_calls.py."""

    connection: Any
    fileno: int  # a lost connection has none
    call: Any  # sends a request, and returns a reply that comes later


RankConnections = Mapping[str, Sequence[RankConnection]]  # to all ranks, by the name of the call


async def connect_ranks(socket_paths: Sequence[str]) -> RankConnections:
    """Connect for every call that the workers serve.

    Raises TimeoutError if a worker accepts and does not answer, and other OSErrors if it refuses.
    """
    loop = asyncio.get_running_loop()
    handshakes = [_Handshake(rank, path, loop) for rank, path in enumerate(socket_paths)]
    executor = ThreadPoolExecutor(len(handshakes), thread_name_prefix="connect")
    ranks = [loop.run_in_executor(executor, handshake.run) for handshake in handshakes]
    executor.shutdown(wait=False)
    await asyncio.wait(ranks, timeout=CONNECT_S, return_when=asyncio.FIRST_EXCEPTION)
    error = _first_error(ranks) or _difference(handshakes)
    while not all(rank.done() for rank in ranks):
        for handshake in handshakes:
            handshake.end()  # again: it may just have begun the next connection
        await asyncio.wait(ranks, timeout=0.1)
    await asyncio.gather(*ranks, return_exceptions=True)
    if error is not None:
        close_all(loop, [rank for handshake in handshakes for rank in handshake.connected.values()])
        raise error
    return {name: [handshake.connected[name] for handshake in handshakes] for name in handshakes[0].connected}


def _first_error(ranks: Sequence[asyncio.Future[None]]) -> BaseException | None:
    for rank in ranks:
        if rank.done() and (error := rank.exception()) is not None:
            return error
    hanging = next((number for number, rank in enumerate(ranks) if not rank.done()), None)
    return None if hanging is None else TimeoutError(f"model worker {hanging} did not answer within {CONNECT_S:g} s")


def _difference(handshakes: Sequence[_Handshake]) -> ConnectionError | None:
    calls = [set(handshake.connected) for handshake in handshakes]
    for rank, served in enumerate(calls):
        if served != calls[0]:
            names = ", ".join(sorted(served ^ calls[0]))
            return ConnectionError(f"model workers 0 and {rank} do not serve the same calls: only one has {names}")
    return None


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

    def __init__(self, rank: int, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self.connected: dict[str, RankConnection] = {}  # by the name of the call
        self._rank = rank
        self._path = path
        self._loop = loop
        self._waiting: socket.socket | None = None  # for an answer of the worker

    def run(self) -> None:
        """Connect for steps first: then the worker says what else it serves."""
        for name in self._connect(RUN.name):
            if name != RUN.name:
                self._connect(name)

    def end(self) -> None:
        """Make ``run`` fail, if it waits for an answer."""
        if (sock := self._waiting) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _connect(self, name: str) -> tuple[str, ...]:
        """Returns the names of all calls that the worker serves.

        Without compression: rpyc would spend 1.5 ms on the step of an 8,000-token prompt, and some on large batches.
        The root of a connection and its method are asked for here, and nothing is waited for later.
        """
        sock = self._waiting = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self._path)
            connection = connect_channel(Channel(LoopStream(sock, self._loop), compress=False), config=RPYC_CONFIG)
            call = rpyc.async_(connection.root.call)
            served: tuple[str, ...] | str = connection.root.connect(name)
            if isinstance(served, str):
                raise ConnectionRefusedError(f"model worker {self._rank} refuses a connection: {served}")
        except BaseException:
            sock.close()
            raise
        self._waiting = None
        self.connected[name] = RankConnection(connection, sock.fileno(), call)
        return served
