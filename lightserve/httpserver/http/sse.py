"""Responses as server-sent events, and work that stops when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, ClassVar, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightserve.errors import ClientDisconnectedError, LightserveError, UnavailableError
from lightserve.httpserver.http.errors import log_stream_error
from lightserve.httpserver.http.unread import Outs as Outs, Write

T = TypeVar("T")

# what /openapi.json says about a response that may be a stream
OPENAPI_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would hold the events back
HAS_EVENTS = "lightserve.has_events"  # in a message of the body: LimitedProtocol sends every event as an HTTP chunk
CONNECTION = "lightserve.connection"  # in the scope of a request: its Connection
RECORDER = "recorder"  # the name of the StreamRecorder in the state of a request
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients ignore it
REPLAYED = 256  # tokens at a time, some milliseconds


class EventWriter(Protocol):
    """Writes tokens as the events of one API. Subclass it: a method that a subclass leaves out has a default."""

    def write(self, outs: Outs) -> bytes: ...

    def is_slow(self, outs: Outs) -> bool:
        """Whether ``write`` takes so long that a thread should do it."""
        return False

    def end(self) -> bytes:
        """What follows the last token."""

    def error(self, error: LightserveError, request_id: str) -> bytes:
        """What replaces the rest of the stream."""

    def keep_alive(self) -> bytes:
        """What is sent when no event was sent for a while, so that proxies keep the connection; empty: nothing."""
        return KEEP_ALIVE


class RecordedGeneration(Protocol):
    """What a recorder needs of a generation before it starts."""

    def fix_seeds(self, seeds: Sequence[int] | None = None) -> list[int]:
        """Sample with these seeds; None: with those of the request, random ones where it has none. Returns them."""

    def continue_after(self, outs: Outs, age_s: float) -> None:
        """The client has these tokens already; the request came ``age_s`` ago."""


class StreamedGeneration(AbstractAsyncContextManager[AsyncIterator[Outs]], RecordedGeneration, Protocol):
    def write_with(self, write: Write) -> None:
        """Tokens may be written with this function while a reader waits for them."""


class Connection(Protocol):
    """The client's end of a response."""

    def can_write(self) -> bool:
        """Whether the response has begun, and the client reads what it gets."""

    def write(self, events: bytes) -> None: ...


class StreamRecorder(Protocol):
    """Keeps the events of a stream, so that its client can come back for them: see httpserver/resume."""

    sent_outs: Outs  # tokens of which the client has the events: another process had the stream before

    def discard(self) -> None:
        """The response is no stream of events."""

    def begin(self, generation: RecordedGeneration, keep_alive: bytes) -> None: ...

    def add(self, outs: Outs, events: bytes) -> bytes:
        """The events of these tokens, with ids."""

    def end(self, events: bytes) -> bytes:
        """The last events, with ids."""

    def release(self) -> None:
        """This server cannot go on; another one may. What follows is not kept."""

    def close(self) -> None:
        """No more events come: the stream has ended, or was abandoned."""

    async def wait_for_reconnect(self, sending: asyncio.Future[Any]) -> None:
        """The client has disconnected: wait while it may come back."""


class EventSource(Protocol):
    """What an EventStream sends."""

    has_begun: bool  # the client knows the status
    keep_alive: bytes
    generator: AsyncGenerator[bytes, None]
    recorder: StreamRecorder | None

    def record(self, recorder: StreamRecorder | None) -> None:
        """Give events ids, and keep them; None: do not. It is called before the first event."""

    def write_to(self, connection: Connection, on_written: Callable[[], None]) -> None:
        """Further events may be written to the connection instead of being generated."""

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


class EventStream(Response):
    """Sends what a generator of event bytes yields, and closes the generator when the client disconnects."""

    media_type = "text/event-stream"
    keep_alive_s: ClassVar[float] = 15.0  # proxies close a connection that is silent for 30 s or longer

    def __init__(
        self, first: asyncio.Future[bytes], events: EventSource, headers: dict[str, str] | None = None
    ) -> None:
        self._first = first
        self._events = events
        self._now = asyncio.get_running_loop().time
        self._last_s = 0.0  # when something was sent
        self._is_sending = False  # an event
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS | (headers or {}))

    def init_headers(self, headers: Any = None) -> None:
        self.body = b""
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    @classmethod
    async def open(cls, request: Request, events: EventSource, headers: dict[str, str] | None = None) -> EventStream:
        """Wait for the first event, so that an error before it is still an HTTP status.

        After ``keep_alive_s`` the status is sent all the same: a proxy would close the connection.
        """
        if cls.media_type == EventStream.media_type:
            events.record(request.scope.get("state", {}).get(RECORDER))
        else:
            _discard_recorder(request)
        first = asyncio.ensure_future(anext(events))
        try:
            await _run_until(first, _disconnected(request.receive), cls.keep_alive_s if events.keep_alive else None)
            if first.done():
                _result(first)
        except BaseException:
            await events.aclose()
            raise
        events.has_begun = True
        return cls(first, events, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if not self._first.done():
            await self._send_keep_alive(send)
        async with aclosing(self._events):
            sending = asyncio.ensure_future(self._send_all(send, scope.get(CONNECTION)))
            watcher = asyncio.ensure_future(_disconnected(receive))
            try:
                while not await _wait((sending, watcher), self._seconds_left()):
                    if self._seconds_left() == 0:
                        await self._send_keep_alive(send)
                if self._events.recorder is not None and not sending.done():
                    await self._events.recorder.wait_for_reconnect(sending)  # what it sends goes nowhere
            finally:
                await _cancel(sending, watcher)
        if not sending.cancelled():
            sending.result()

    async def _send_all(self, send: Send, connection: Connection | None) -> None:
        await self._send(send, await self._first)
        if connection is not None:
            self._events.write_to(connection, self._was_sent)
        async for events in self._events.generator:
            await self._send(send, events)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, events: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": events, "more_body": True, HAS_EVENTS: True})
        self._is_sending = False
        self._was_sent()

    def _was_sent(self) -> None:
        self._last_s = self._now()

    async def _send_keep_alive(self, send: Send) -> None:
        self._was_sent()
        if not self._is_sending:  # else the client does not read, and has unread events
            await send({"type": "http.response.body", "body": self._events.keep_alive, "more_body": True})

    def _seconds_left(self) -> float | None:
        """Until the next keep-alive; None: the stream sends none."""
        if not self._events.keep_alive:
            return None
        return max(0.0, self._last_s + self.keep_alive_s - self._now())


class GenerationEvents:
    """The tokens of a generation as events. An error before the stream has begun is raised; a later one is an event."""

    def __init__(self, generation: StreamedGeneration, writer: EventWriter, request_id: str) -> None:
        self.has_begun = False  # the client knows the status
        self.keep_alive = writer.keep_alive()
        self.recorder: StreamRecorder | None = None
        self.generator = self._generate(generation, writer, request_id)
        self._generation = generation
        self._writer = writer

    def record(self, recorder: StreamRecorder | None) -> None:
        if recorder is not None:
            recorder.begin(self._generation, self.keep_alive)
            self.recorder = recorder
            self.generator = _closing(self.generator, recorder)

    def write_to(self, connection: Connection, on_written: Callable[[], None]) -> None:
        if self.recorder is not None:  # the events get ids
            return
        can_write, is_slow, write_outs, write_events = (
            connection.can_write,
            self._writer.is_slow,
            self._writer.write,
            connection.write,
        )

        def write(outs: Outs) -> bool:  # for every token of every stream: each call counts
            if not can_write() or is_slow(outs):
                return False
            events = write_outs(outs)
            if events:
                write_events(events)
                on_written()
            return True

        self._generation.write_with(write)

    async def __anext__(self) -> bytes:
        return await anext(self.generator)

    async def aclose(self) -> None:
        await self.generator.aclose()

    async def _generate(
        self, generation: StreamedGeneration, writer: EventWriter, request_id: str
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with generation as batches:
                recorder = self.recorder
                if recorder is not None:
                    await _replay(recorder, writer)
                async for outs in batches:
                    events = await asyncio.to_thread(writer.write, outs) if writer.is_slow(outs) else writer.write(outs)
                    if recorder is not None:
                        events = recorder.add(outs, events)
                    if events:
                        self.has_begun = True
                        yield events
            end = writer.end()
        except LightserveError as error:
            if not self.has_begun:
                raise
            log_stream_error(error, request_id)
            end = writer.error(error, request_id)
            if self.recorder is not None and isinstance(error, UnavailableError):
                self.recorder.release()
        if self.recorder is not None:
            end = self.recorder.end(end)
        if end:
            yield end


async def _replay(recorder: StreamRecorder, writer: EventWriter) -> None:
    """Bring the writer to where the client is. It may be a long way: others must not wait for all of it."""
    sent_outs, recorder.sent_outs = recorder.sent_outs, []
    for at in range(0, len(sent_outs), REPLAYED):
        writer.write(sent_outs[at : at + REPLAYED])
        await asyncio.sleep(0)


async def _closing(events: AsyncGenerator[bytes, None], recorder: StreamRecorder) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for some in events:
                yield some
    finally:
        recorder.close()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects. The body must have been read."""
    _discard_recorder(request)
    task = asyncio.ensure_future(work)
    await _run_until(task, _disconnected(request.receive))
    return _result(task)


def _discard_recorder(request: Request) -> None:
    recorder: StreamRecorder | None = request.scope.get("state", {}).pop(RECORDER, None)
    if recorder is not None:
        recorder.discard()


async def _run_until(
    task: asyncio.Future[Any], event: Coroutine[Any, Any, None], timeout_s: float | None = None
) -> None:
    """Wait for ``task``; cancel it when ``event`` comes first. After ``timeout_s`` it is left running."""
    watcher = asyncio.ensure_future(event)
    is_over = True
    try:
        is_over = await _wait((task, watcher), timeout_s)
    finally:
        await (_cancel(task, watcher) if is_over else _cancel(watcher))


def _result(task: asyncio.Future[T]) -> T:
    if task.cancelled():
        raise ClientDisconnectedError("the client closed the connection")
    return task.result()


async def _wait(tasks: Sequence[asyncio.Future[Any]], timeout_s: float | None) -> bool:
    """Whether one of ``tasks`` has ended before the timeout."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.wait(tasks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
