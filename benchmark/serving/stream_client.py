"""Clients with little overhead: one process can run thousands of them."""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

KEPT_BYTES = 200  # of the end of a response


class StreamClient(asyncio.Protocol):
    """Sends one request and counts the events until the response ends; parses as little as possible."""

    def __init__(self, request: bytes, event: bytes = b"data:") -> None:
        """``event``: what every event has once."""
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.reads = 0
        self.status = 0  # of the response; 0: there was none
        self._request = request
        self._event = event
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.status = self.status or int(data[9:12])  # after "HTTP/1.1 "
        self.events += data.count(self._event)
        self._end = (self._end + data)[-KEPT_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(self._end)


class DisconnectingClient(StreamClient):
    """Disconnects after ``events`` events. 0: as soon as it has sent its request."""

    def __init__(self, request: bytes, events: int) -> None:
        super().__init__(request)
        self._max_events = events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._disconnect_if_due()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._disconnect_if_due()

    def _disconnect_if_due(self) -> None:
        if self.events >= self._max_events:
            self.close()


async def finish(client: StreamClient, url: str) -> bytes:
    """Send its request to ``url``. Returns the last bytes of the response."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: client, address.hostname or "", address.port or 80)
    try:
        return await client.done
    finally:
        client.close()


def post(host: str, path: str, body: bytes) -> bytes:
    """A request after which the server closes the connection."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
