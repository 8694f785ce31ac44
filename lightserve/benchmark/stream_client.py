"""Clients that cost little: thousands of them fit into one process."""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

KEPT_BYTES = 200  # of the end of an answer


class StreamClient(asyncio.Protocol):
    """Sends one request and counts the events until its answer ends; parses as little as possible."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.reads = 0
        self.status = 0  # of the answer; 0 if none came
        self._request = request
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.status = self.status or int(data[9:12])  # after "HTTP/1.1 "
        self.events += data.count(b"data:")
        self._end = (self._end + data)[-KEPT_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(self._end)


class LeavingClient(StreamClient):
    """Hangs up after so many events, 0: as soon as it has asked."""

    def __init__(self, request: bytes, events: int) -> None:
        super().__init__(request)
        self._patience = events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._leave_in_time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._leave_in_time()

    def _leave_in_time(self) -> None:
        if self.events >= self._patience:
            self.close()


async def finish(client: StreamClient, url: str) -> bytes:
    """Send its request there; the end of the answer."""
    place = urlsplit(url)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: client, place.hostname or "", place.port or 80)
    try:
        return await client.done
    finally:
        client.close()


def post(host: str, path: str, body: bytes) -> bytes:
    """A request after whose answer the server closes the connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
