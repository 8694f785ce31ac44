"""Runs a line of a batch by the route of its endpoint, as if a client had sent it. No socket is involved."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Scope

from lightserve.batches.line import LineRequest
from lightserve.batches.usage import NO_USAGE, Usage, usage_of
from lightserve.httpserver.http.access_log import ResponseRecord
from lightserve.httpserver.http.errors import error_object, log_error
from lightserve.messages.params import BACKGROUND_PRIORITY

SHORTEST_S, LONGEST_S = 1e-3, 20e-3  # between the beginnings of two lines


class LineResponse(NamedTuple):
    status: int
    request_id: str
    body: Any  # what orjson writes: an object, or the bytes of one as they came
    usage: Usage = NO_USAGE


class LineRunner:
    def __init__(self, app: ASGIApp, logs_requests: bool) -> None:
        """``app`` has the routes, without the middleware that checks keys: that was done when the batch was made."""
        self._app = app
        self._logs_requests = logs_requests
        self._pace = LinePace()

    async def run(self, line: LineRequest, owner: str, request_id: str) -> LineResponse:
        await self._pace.wait()
        record = ResponseRecord("POST", line.url, self._logs_requests)
        try:
            return await self._response(line, owner, request_id, record)
        except Exception as error:  # of this line only: it has its place among the errors of the batch
            log_error(error, request_id, record)
            return LineResponse(500, request_id, error_object(error, request_id))
        finally:
            record.end()

    async def _response(self, line: LineRequest, owner: str, request_id: str, record: ResponseRecord) -> LineResponse:
        body = orjson.dumps(line.body | {"priority": BACKGROUND_PRIORITY})
        state = {"request_id": request_id, "record": record, "owner": owner}
        exchange = _Exchange(body, record, request_id)
        await self._app(_scope(line.url, body, state), exchange.receive, exchange.send)
        received = b"".join(exchange.received)
        usage = usage_of(orjson.loads(received))  # what is no JSON would be a line that nobody can read
        return LineResponse(exchange.status, request_id, orjson.Fragment(received), usage)


class LinePace:
    """Lets lines begin one by one. In between, the event loop is as long for clients as the last line has kept it busy.

    Lines come in hundreds when a step ends others. A client's request takes several iterations of the loop.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._last_s = 0.0  # when the last line began

    async def wait(self) -> None:
        async with self._turn:
            busy_s = time.monotonic() - self._last_s
            await asyncio.sleep(min(max(busy_s, SHORTEST_S), LONGEST_S))
            self._last_s = time.monotonic()


class _Exchange:
    def __init__(self, body: bytes, record: ResponseRecord, request_id: str) -> None:
        self.status = 500
        self.received: list[bytes] = []
        self._body: bytes | None = body
        self._record = record
        self._request_id = request_id

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # a line does not disconnect; cancelling its task ends it
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._record.start(self.status, self._request_id)
        else:
            self.received.append(message.get("body", b""))


def _scope(path: str, body: bytes, state: dict[str, Any]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "state": state,
    }
