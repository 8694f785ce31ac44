"""HTTP/1.1 on a connection: uvicorn's protocol, with limits for the head of a request and JSON errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, MutableMapping
from functools import partial
from typing import Any, ClassVar

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from lightserve.errors import BodyTimeoutError, HeadersTooLargeError, InvalidRequestError, LightserveError
from lightserve.httpserver.http.access_log import log_refusal
from lightserve.httpserver.http.errors import error_object
from lightserve.httpserver.http.sse import CONNECTION, HAS_EVENTS

MAX_HEAD_BYTES = 64 * 1024  # request line and headers; the parser has no limit and takes quadratic time
HEADER_COST = 32  # counted for each header besides its bytes, as in HTTP/2: it limits many short headers
HEAD_TIMEOUT_S = 30.0
STALL_S = (
    60.0  # until a full write buffer must be empty: a client that reads less than 64 KB in that time is disconnected
)
END_OF_EVENT = b"\n\n"  # an event has no empty line inside: JSON escapes line breaks
SIZE_LINES = [b"%x\r\n" % size for size in range(2048)]  # before an HTTP chunk of so many bytes; an event has some 200
LINGER_S = 2.0  # for a refused client that still sends to read the error, before the connection closes


class LimitedProtocol(HttpToolsProtocol):
    logs_refusals: ClassVar[bool] = True
    _is_in_head = False
    _is_refused = False
    _stalled: asyncio.TimerHandle | None = None  # runs while the client does not read
    _gathered_bytes = 0  # in the parser: of a head, or of trailers after a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = partial(_serve, self.app)
        self._end_after(self.timeout_keep_alive)  # also if no request comes

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # the base class leaves it running when the connection breaks
        self._cancel_stall_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)  # this aborts its request too

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._is_in_head:
            self._unset_keepalive_if_required()
        self._gathered_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            ours = error.__context__  # raised by a callback
            self._refuse(ours if isinstance(ours, LightserveError) else InvalidRequestError("this is not valid HTTP"))
        else:
            self._limit_gathered()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._gathered_bytes = 0
        self._unset_keepalive_if_required()
        if len(self.url) + sum([len(name) + len(value) + HEADER_COST for name, value in self.headers]) > MAX_HEAD_BYTES:
            raise _too_large()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._gathered_bytes = 0
        super().on_body(body)

    def _limit_gathered(self) -> None:
        if self._gathered_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif self._is_in_head and self.timeout_keep_alive_task is None:  # only the first bytes start the timer
            late = BodyTimeoutError(f"the head did not arrive within {HEAD_TIMEOUT_S:.0f} s")
            self.timeout_keep_alive_task = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, late)

    def _should_upgrade(self) -> bool:
        return True  # then the parser raises HttpParserUpgrade, see _decline_upgrade

    def _decline_upgrade(self, rest: bytes) -> None:
        """Serve the request without the upgrade; it may have a body: curl and Java's client offer HTTP/2 with a POST.

        The parser has stopped after the head, so a new parser gets the head again.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(InvalidRequestError("this is not a proxy"))
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _refuse(self, error: LightserveError) -> None:
        self._is_refused = True
        if self.logs_refusals:
            log_refusal("-" if self.client is None else f"{self.client[0]}:{self.client[1]}", error.status, str(error))
        cycle = self.cycle
        is_responding = cycle is not None and not cycle.response_complete
        if not is_responding or not cycle.response_started:
            self.transport.write(_response(error))
        if is_responding:
            cycle.disconnected = (
                True  # as if the client had disconnected: nothing more is written, and its request is aborted
            )
            cycle.message_event.set()
        if self.transport.can_write_eof():  # TLS cannot; the response has a Content-Length
            self.transport.write_eof()
        self._end_after(LINGER_S)

    def _cancel_stall_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _end_after(self, seconds: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)


class QuietProtocol(LimitedProtocol):
    logs_refusals = False


async def _serve(app: ASGIApp, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Nothing that is made here outlives the request: its cycle would keep it until a garbage collection."""
    cycle: RequestResponseCycle = send.__self__  # type: ignore[attr-defined]
    scope[CONNECTION] = ResponseConnection(cycle)
    try:
        await app(scope, receive, partial(_send, cycle, send))
    finally:
        del scope[CONNECTION]


def _send(cycle: RequestResponseCycle, send: Send, message: Message) -> Awaitable[None]:
    """Send every event of a message as an HTTP chunk of its own, in one write.

    LightLLM's benchmark client takes an HTTP chunk for one event. A message for each event would take 2 us more.
    """
    body: bytes = message.get("body", b"")
    is_split = HAS_EVENTS in message and cycle.chunked_encoding and _has_several(body)
    return _send_events(cycle, body) if is_split else send(message)


async def _send_events(cycle: RequestResponseCycle, events: bytes) -> None:
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if not cycle.disconnected:
        cycle.transport.write(_chunks(events))


def _has_several(events: bytes) -> bool:
    return -1 < events.find(END_OF_EVENT) < len(events) - len(END_OF_EVENT)


def _chunks(events: bytes) -> bytes:
    return b"".join(
        [b"%x\r\n%b\n\n\r\n" % (len(event) + len(END_OF_EVENT), event) for event in events.split(END_OF_EVENT) if event]
    )


class ResponseConnection:
    """Writes to the response of a request without awaiting the ASGI layers in between: they only add headers."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def can_write(self) -> bool:
        cycle = self._cycle
        is_closed = cycle.disconnected or cycle.response_complete or cycle.flow.write_paused
        return bool(cycle.chunked_encoding) and not is_closed

    def write(self, events: bytes) -> None:
        size = len(events)
        if events.find(END_OF_EVENT, 0, size - len(END_OF_EVENT)) >= 0:
            chunks = _chunks(events)
        else:
            line = SIZE_LINES[size] if size < len(SIZE_LINES) else b"%x\r\n" % size
            chunks = b"".join((line, events, b"\r\n"))
        self._cycle.transport.write(chunks)


def _too_large() -> HeadersTooLargeError:
    return HeadersTooLargeError(f"the request's head is larger than {MAX_HEAD_BYTES} bytes")


def _response(error: LightserveError) -> bytes:
    body = orjson.dumps(error_object(error))
    headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINE[error.status] + headers + body
