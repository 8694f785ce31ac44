"""Responses as server-sent events, and work that stops when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightserve.errors import ClientDisconnectedError, LightserveError
from lightserve.httpserver.wire.errors import log_error
from lightserve.io_struct import StrOut

T = TypeVar("T")
Outs = list[tuple[int, StrOut]]  # tokens, each with the index of its sequence

# what /openapi.json says about a response that may be a stream
OPENAPI_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold the events back


class EventWriter(Protocol):
    """Writes tokens as the events of one API."""

    def write(self, outs: Outs) -> bytes: ...

    def end(self) -> bytes:
        """What follows the last token."""

    def error(self, error: LightserveError, request_id: str) -> bytes:
        """What replaces the rest of the stream."""


class EventStream(Response):
    """Sends what a generator of event bytes yields, and closes the generator when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None
    ) -> None:
        self._first = first
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS | (headers or {}))

    def init_headers(self, headers: Any = None) -> None:
        self.body = b""
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    @classmethod
    async def open(
        cls, request: Request, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None
    ) -> EventStream:
        """Wait for the first event, so that an error before it is still an HTTP status."""
        try:
            first = await until_disconnect(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(first, events, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            sending = asyncio.ensure_future(self._send_all(send))
            await _run_until(sending, _disconnected(receive))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events_of(
    generation: AbstractAsyncContextManager[AsyncIterator[Outs]], writer: EventWriter, request_id: str
) -> AsyncGenerator[bytes, None]:
    """The tokens of a generation as events. An error before the first event is raised; a later one is an event."""
    has_begun = False
    try:
        async with generation as batches:
            async for outs in batches:
                events = writer.write(outs)
                if events:
                    has_begun = True
                    yield events
        end = writer.end()
    except LightserveError as error:
        if not has_begun:
            raise
        log_error(error, request_id)
        end = writer.error(error, request_id)
    if end:
        yield end


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects. The body must have been read."""
    task = asyncio.ensure_future(work)
    await _run_until(task, _disconnected(request.receive))
    if task.cancelled():
        raise ClientDisconnectedError("the client closed the connection")
    return task.result()


async def _run_until(task: asyncio.Future[Any], event: Coroutine[Any, Any, None]) -> None:
    """Wait for ``task``; cancel it when ``event`` comes first."""
    watcher = asyncio.ensure_future(event)
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, watcher):
            if not one.done():
                one.cancel()
        await asyncio.wait((task, watcher))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
