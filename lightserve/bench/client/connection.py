"""HTTP/1.1 connections that stay open between requests, with little work per token."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from lightserve.bench.client.stream import StreamedResponse

IDLE_S = 2.0  # servers close idle connections, uvicorn after 5 s; a request on a closed one would fail
DEFAULT_PORTS = {"http": 80, "https": 443}


class Target(msgspec.Struct, frozen=True):
    """Where requests go. ``head`` is the request without Content-Length and body."""

    host: str
    port: int
    is_tls: bool
    head: bytes

    def request(self, body: bytes) -> bytes:
        return b"%bContent-Length: %d\r\n\r\n%b" % (self.head, len(body), body)


def target_of(url: str, path: str, headers: dict[str, str]) -> Target:
    address = urlsplit(url)
    scheme, host = address.scheme, address.hostname
    if scheme not in DEFAULT_PORTS or not host:
        raise ValueError(f"--url {url} is no address of a server; use one like http://127.0.0.1:8000")
    if address.username is not None:
        raise ValueError(
            "--url has a user name, which results would store; use --api_key or --header Authorization:..."
        )
    fields = {
        "Host": address.netloc,
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        **headers,
    }
    lines = [f"POST {address.path.rstrip('/')}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    head = "".join(f"{line}\r\n" for line in lines).encode()
    return Target(host, address.port or DEFAULT_PORTS[scheme], scheme == "https", head)


class Connection(asyncio.Protocol):
    """One request at a time. The time of a read is taken before anything is parsed."""

    def __init__(self) -> None:
        self.is_open = True
        self.idle_since = 0.0
        self._now = 0.0

    async def exchange(self, request: bytes, response: StreamedResponse) -> None:
        """Send a request and wait for the end of its response. Raises ConnectionError if there is none."""
        self._response = response
        self._content_type = b""
        self._has_length = False  # or is chunked: else the response ends with the connection
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"the response is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if not hasattr(self, "_done") or self._done.done():
            return
        if error is None and self._response.has_begun and not self._has_length:
            self._end(None)
        else:
            self._end(ConnectionError(f"the server closed the connection{f': {error}' if error else ''}"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # 100 Continue is not the response
            self._response.start(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        self._response.feed(body, self._now)

    def on_message_complete(self) -> None:
        if self._response.has_begun:
            self.is_open = self.is_open and self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Connections:
    """Idle connections to one server. The last one used is used first."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def send(self, body: bytes, response: StreamedResponse) -> None:
        request = self._target.request(body)
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, request, response)
            except ConnectionError:
                if response.has_begun:
                    raise
                # the server closed the idle connection at this moment
        return await self._exchange(await self._connect(), request, response)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _exchange(self, connection: Connection, request: bytes, response: StreamedResponse) -> None:
        is_whole = False
        try:
            await connection.exchange(request, response)
            is_whole = True
        finally:  # a cancelled request leaves a response that nobody reads
            if is_whole and connection.is_open:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        target = self._target
        _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=self._tls)
        return connection
