"""The older transport of MCP: a stream of server-sent events, whose first event names the endpoint for messages.

Answers come as events of the stream. It stays open for the session, and one request waits for its answer at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urljoin

from lightserve.errors import InvalidRequestError, McpError
from lightserve.mcp.exchange import Answer, Event, EventStream, Message, answer_in
from lightserve.mcp.servers import McpConnector, McpServer
from lightserve.outbound.urls import OutboundUrl, parse_url

PATH = "/sse"  # by which servers of this transport are known
ENDED = "its stream of events has ended"


def is_of_older_transport(url: OutboundUrl) -> bool:
    return url.target.partition("?")[0].rstrip("/").endswith(PATH)


class SseTransport:
    def __init__(self, connector: McpConnector) -> None:
        self._connector = connector
        self._lock = asyncio.Lock()
        self._stream: EventStream | None = None  # None: not opened yet
        self._events: AsyncIterator[Event] | None = None  # None: it has ended, or was not opened
        self._endpoint: OutboundUrl | None = None

    async def send(self, server: McpServer, message: Message) -> Answer:
        """Raises McpError. What goes wrong in the stream ends it: answers could not be told apart any more."""
        async with self._lock:
            try:
                async with self._connector.time_limit():
                    endpoint, events = await self._opened(server, message)
                    await self._connector.send(server, replace(message, url=endpoint, request_id=None))
                    return Answer({}) if message.request_id is None else await _answer(events, message.request_id)
            except BaseException:
                self.close()
                raise

    async def _opened(self, server: McpServer, message: Message) -> tuple[OutboundUrl, AsyncIterator[Event]]:
        if self._stream is None:
            request = replace(message, content=b"", request_id=None, method="GET")
            self._stream = await self._connector.open_stream(server, request)
            self._events = self._stream.events()
            self._endpoint = await _endpoint(self._events, server.url)
        if self._endpoint is None or self._events is None:
            raise McpError(ENDED)
        return self._endpoint, self._events

    def close(self) -> None:
        self._events = None
        if self._stream is not None:
            self._stream.close()


async def _endpoint(events: AsyncIterator[Event], url: OutboundUrl) -> OutboundUrl:
    async for name, data in events:
        if name == b"endpoint":
            base = f"{url.scheme}://{url.host_header}{url.target}"
            try:
                endpoint = parse_url(urljoin(base, data.decode("ascii")))
            except (InvalidRequestError, ValueError) as error:
                raise McpError("the endpoint for messages that it names is no URL") from error
            if (endpoint.scheme, endpoint.host, endpoint.port) != (url.scheme, url.host, url.port):
                raise McpError("the endpoint for messages that it names is of another server")
            return endpoint
    raise McpError(ENDED)


async def _answer(events: AsyncIterator[Event], request_id: int) -> Answer:
    async for _, data in events:
        if message := answer_in(data, request_id):
            return Answer({}, message)
    raise McpError(ENDED)
