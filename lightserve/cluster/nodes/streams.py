"""Byte streams between sockets of two machines, as messages of the one link between them.

local socket ── endpoint ── Streams ══ OpenStream, StreamData, StreamEnd ══ Streams ── endpoint ── local socket
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from lightserve.ipc.channel import MessageError
from lightserve.messages.nodes import (
    ConnectArena,
    ConnectRank,
    ConnectStore,
    OpenStream,
    StartRank,
    StreamData,
    StreamEnd,
    StreamMessage,
)

READ_BYTES = 1 << 16
MAX_UNREAD_BYTES = 64 << 20  # of one stream: a step of a prompt of a million tokens takes 4 MB
MAX_STREAMS = 4096  # of one link; a rank has fewer than ten

Target = StartRank | ConnectRank | ConnectStore | ConnectArena


class Endpoint(Protocol):
    """The local end of a stream."""

    async def read(self) -> bytes:
        """Some bytes; none: there will be no more."""

    async def write(self, data: bytes) -> None: ...

    def end(self) -> None:
        """The other side sends no more."""

    def close(self) -> None: ...


class SocketEndpoint:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        return await self._reader.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        if not self._writer.is_closing():
            self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()


class _Stream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()  # from the other side; b"" is its end
        self.unread_bytes = 0
        self.endpoint: Endpoint | None = None  # None: not connected yet
        self.task: asyncio.Task[None]


class Streams:
    """All streams of one link. ``send`` puts a message on the link, and never blocks."""

    def __init__(self, send: Callable[[StreamMessage], None], first_number: int) -> None:
        """``first_number``: 0 or 1, another one on each side, so that both can open streams."""
        self._send = send
        self._next_number = first_number
        self._is_lost = False
        self._streams: dict[int, _Stream] = {}

    def open(self, target: Target, endpoint: Endpoint) -> asyncio.Task[None]:
        """Have the other side connect ``target`` with ``endpoint``. The task ends with the stream."""
        if self._is_lost:
            endpoint.close()
            return asyncio.create_task(asyncio.sleep(0))
        number, self._next_number = self._next_number, self._next_number + 2
        self._send(OpenStream(number, target))
        stream = self._streams[number] = _Stream(number)
        stream.endpoint = endpoint
        stream.task = asyncio.create_task(self._run(stream))
        return stream.task

    def accept(self, number: int, connect: Callable[[], Awaitable[Endpoint]]) -> None:
        """The other side has opened a stream. ``connect`` may raise OSError: the target is gone."""
        if number % 2 == self._next_number % 2 or number in self._streams:
            raise MessageError(f"a stream has the number {number}, which it must not have")
        if len(self._streams) >= MAX_STREAMS:
            raise MessageError(f"there are more than {MAX_STREAMS} streams")
        stream = self._streams[number] = _Stream(number)
        stream.task = asyncio.create_task(self._run(stream, connect))

    def handle(self, message: StreamData | StreamEnd) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:  # this side has closed it
            return
        if isinstance(message, StreamEnd):
            stream.incoming.put_nowait(b"")
        elif message.data:
            stream.unread_bytes += len(message.data)
            if stream.unread_bytes > MAX_UNREAD_BYTES:
                stream.task.cancel()
            else:
                stream.incoming.put_nowait(message.data)

    def cancel(self) -> None:
        """Close all local ends: the link is lost."""
        self._is_lost = True
        for stream in self._streams.values():
            stream.task.cancel()
            if stream.endpoint is not None:  # a task that is cancelled before it begins closes nothing
                stream.endpoint.close()

    async def close(self) -> None:
        """The same, and wait until nothing uses them any more."""
        tasks = [stream.task for stream in self._streams.values()]
        self.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._streams.clear()

    async def _run(self, stream: _Stream, connect: Callable[[], Awaitable[Endpoint]] | None = None) -> None:
        try:
            if connect is not None:
                stream.endpoint = await connect()
            assert stream.endpoint is not None
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_all(stream, stream.endpoint))
                tasks.create_task(_receive_all(stream, stream.endpoint))
        except* OSError:  # the local end is gone; the other side sees the end of the stream
            pass
        finally:
            self._streams.pop(stream.number, None)
            if stream.endpoint is not None:
                stream.endpoint.close()
            self._send(StreamEnd(stream.number))

    async def _send_all(self, stream: _Stream, endpoint: Endpoint) -> None:
        while data := await endpoint.read():
            self._send(StreamData(stream.number, data))
        self._send(StreamEnd(stream.number))


async def _receive_all(stream: _Stream, endpoint: Endpoint) -> None:
    while data := await stream.incoming.get():
        await endpoint.write(data)
        stream.unread_bytes -= len(data)
    endpoint.end()
