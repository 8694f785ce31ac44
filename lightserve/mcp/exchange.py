"""One JSON-RPC message to an MCP server as an HTTP request, and the message that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11
import orjson

from lightserve import __version__
from lightserve.errors import McpError
from lightserve.outbound.dial import READ_BYTES, Streams
from lightserve.outbound.urls import OutboundUrl

JsonObject = dict[str, Any]
Event = tuple[bytes, bytes]  # name and data

MAX_ANSWER_BYTES = 4 * 2**20
ACCEPTED = "application/json, text/event-stream"
BROKEN = "its answer is broken or incomplete"


@dataclass(frozen=True, slots=True)
class Answer:
    headers: Mapping[str, str]
    message: JsonObject = field(default_factory=dict)  # empty: the server took a notification


@dataclass(frozen=True, slots=True)
class Message:
    """``request_id`` None: a notification, which has no answer."""

    url: OutboundUrl
    headers: Mapping[str, str]
    content: bytes
    request_id: int | None
    method: str = "POST"


async def exchange(streams: Streams, message: Message) -> Answer:
    """Raises McpError. The connection is closed afterwards."""
    reader, writer = streams
    try:
        return await _Exchange(reader).run(writer, message)
    except (OSError, EOFError, h11.ProtocolError) as error:
        raise McpError(BROKEN) from error
    finally:
        writer.transport.abort()


class EventStream:
    """The answer to a GET, which stays open."""

    def __init__(self, streams: Streams, on_closed: Callable[[], None]) -> None:
        reader, self._writer = streams
        self._exchange = _Exchange(reader)
        self._on_closed: Callable[[], None] | None = on_closed

    async def open(self, message: Message) -> None:
        try:
            headers = await self._exchange.begin(self._writer, message)
            if not _is_stream(headers):
                raise McpError("its answer is no stream of events")
        except (OSError, EOFError, h11.ProtocolError) as error:
            self.close()
            raise McpError(BROKEN) from error
        except BaseException:
            self.close()
            raise

    async def events(self) -> AsyncIterator[Event]:
        """Their names and data. Those that are skipped between two answers count to the size of the second one."""
        try:
            async for event in self._exchange.events():
                yield event
                self._exchange.size = 0
        except (OSError, EOFError, h11.ProtocolError) as error:
            raise McpError(BROKEN) from error

    def close(self) -> None:
        self._writer.transport.abort()
        if self._on_closed is not None:
            self._on_closed()
            self._on_closed = None


class _Exchange:
    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.size = 0  # of the answer so far
        self._reader = reader
        self._connection = h11.Connection(h11.CLIENT)

    async def begin(self, writer: asyncio.StreamWriter, message: Message) -> dict[str, str]:
        """Returns the headers of the answer."""
        writer.write(self._sent(message))
        await writer.drain()
        response = await self._response()
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        self._check(response, headers)
        return headers

    async def run(self, writer: asyncio.StreamWriter, message: Message) -> Answer:
        headers = await self.begin(writer, message)
        if message.request_id is None:
            return Answer(headers)
        answer = await (self._from_stream if _is_stream(headers) else self._from_body)(message.request_id)
        return Answer(headers, answer)

    def _sent(self, message: Message) -> bytes:
        fixed = {
            "Host": message.url.host_header,
            "User-Agent": f"lightserve/{__version__}",
            "Accept": ACCEPTED,
            "Accept-Encoding": "identity",
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(message.content)),
        }
        headers = list({**message.headers, **fixed}.items())
        request = h11.Request(method=message.method, target=message.url.target, headers=headers)
        parts = [self._connection.send(request), self._connection.send(h11.Data(data=message.content))]
        return b"".join(data for data in [*parts, self._connection.send(h11.EndOfMessage())] if data)

    async def _response(self) -> h11.Response:
        while not isinstance(event := await self._event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise McpError(BROKEN)
        return event

    def _check(self, response: h11.Response, headers: Mapping[str, str]) -> None:
        status = response.status_code
        if not 200 <= status < 300:
            advice = "; check its headers and its token" if status in (401, 403) else ""
            raise McpError(f"it answered with status {status}{advice}", _http_error(status))
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise McpError("its answer is compressed, although that was not wanted")

    async def _from_body(self, request_id: int) -> JsonObject:
        body = b"".join([data async for data in self._body()])
        return answer_in(body, request_id) or _no_answer()

    async def _from_stream(self, request_id: int) -> JsonObject:
        """Of server-sent events; what the server notifies about before its answer is skipped."""
        async for _, data in self.events():
            if answer := answer_in(data, request_id):
                return answer
        return _no_answer()

    async def events(self) -> AsyncIterator[Event]:
        unread = b""
        async for data in self._body():
            *events, unread = (unread + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                lines = event.split(b"\n")
                names = [line[6:].strip() for line in lines if line.startswith(b"event:")]
                if texts := [line[5:].strip() for line in lines if line.startswith(b"data:")]:
                    yield names[-1] if names else b"message", b"\n".join(texts)

    async def _body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._event(), h11.Data):
            self.size += len(event.data)
            if self.size > MAX_ANSWER_BYTES:
                raise McpError(f"its answer has more than {MAX_ANSWER_BYTES // 2**20} MiB")
            yield bytes(event.data)

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(await self._reader.read(READ_BYTES))
        return event  # type: ignore[return-value]


def _is_stream(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").lower().startswith("text/event-stream")


def answer_in(text: bytes, request_id: int) -> JsonObject | None:
    """The answer to this request; None: the text has another message."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise McpError("its answer is not JSON") from error
    for message in value if isinstance(value, list) else [value]:
        if isinstance(message, dict) and message.get("id") == request_id and message.keys() & {"result", "error"}:
            return message
    return None


def _no_answer() -> JsonObject:
    raise McpError("it did not answer the request")


def _http_error(status: int) -> JsonObject:
    return {"type": "http_error", "code": status, "message": f"the MCP server answered with status {status}"}
