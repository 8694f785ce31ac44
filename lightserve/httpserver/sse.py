"""Answers that come piece by piece, and callers that leave before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightserve.errors import ClientDisconnectedError, LightserveError
from lightserve.httpserver.error_handlers import log_error
from lightserve.httpserver.manager import Generation
from lightserve.io_struct import StrOut

T = TypeVar("T")

# what /openapi.json says of an answer that may come so
DOCUMENTED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold the events back


class EventStream(Response):
    """Sends what a generator of event bytes yields; a client that leaves closes the generator."""

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
        """Waits for the first event, so that an error before it is still an HTTP status."""
        try:
            first = await unless_gone(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(first, events, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            sending = asyncio.ensure_future(self._send_all(send))
            await _first_done(sending, _gone(receive))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventWriter(Protocol):
    """One schema's way to put what came into the bytes of events."""

    def write(self, news: list[tuple[int, StrOut]]) -> bytes: ...

    def end(self) -> bytes:
        """What comes after the last token."""

    def error(self, error: LightserveError, request_id: str) -> bytes:
        """What comes instead of the rest."""


async def events_of(generation: Generation, writer: EventWriter) -> AsyncGenerator[bytes, None]:
    """A generation as events. An error before the first of them is raised: it can still be an HTTP status."""
    has_begun = False
    try:
        async with generation:
            async for news in generation:
                events = writer.write(news)
                if events:
                    has_begun = True
                    yield events
        end = writer.end()
    except LightserveError as error:
        if not has_begun:
            raise
        request_id = generation.log.request_id
        log_error(error, request_id)
        end = writer.error(error, request_id)
    if end:
        yield end


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves. The body must have been read."""
    task = asyncio.ensure_future(work)
    await _first_done(task, _gone(request.receive))
    if task.cancelled():
        raise ClientDisconnectedError("the client closed the connection")
    return task.result()


async def _first_done(task: asyncio.Future[Any], other: Coroutine[Any, Any, None]) -> None:
    """Waits for ``task``; cancels it when ``other`` ends first."""
    watcher = asyncio.ensure_future(other)
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (task, watcher):
            if not one.done():
                one.cancel()
        await asyncio.wait((task, watcher))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
