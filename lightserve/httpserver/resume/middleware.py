"""Gives every POST a recorder for its stream, and answers a client that comes back with ``Last-Event-ID``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightserve.httpserver.http.access_log import ResponseRecord
from lightserve.httpserver.http.middleware import key_digests
from lightserve.httpserver.http.paths import route_path
from lightserve.httpserver.http.sse import RECORDER, EventStream
from lightserve.httpserver.resume.logged_stream import NewStream, ResumedStream
from lightserve.httpserver.resume.records import Head, owner_hash
from lightserve.httpserver.resume.replay import Replay
from lightserve.httpserver.resume.stream_log import StreamLog
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

# of the client that came back, but not of the request that it resumes
NOT_REPEATED = frozenset({b"last-event-id", b"content-length", b"content-type", b"transfer-encoding", b"x-request-id"})
MAY_WORK_ELSEWHERE = frozenset({0, 429, 503})  # this server is full, drains or has no engine


class StreamLogMiddleware:
    """It is inside RequestMiddleware, which has checked the key, and only in the application with --stream_log."""

    def __init__(self, app: ASGIApp, stream_log: StreamLog, logs_requests: bool) -> None:
        self._app = app
        self._stream_log = stream_log
        self._logs_requests = logs_requests
        self._continued: set[asyncio.Task[int]] = set()  # requests of dead processes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        owner = owner_hash(key_digests(headers))
        if b"last-event-id" in headers:
            await self._resume(scope, receive, send, owner)
            return
        body: list[bytes] = []

        async def receive_and_keep() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.append(message.get("body", b""))
            return message

        state: MutableMapping[str, Any] = scope["state"]
        state[RECORDER] = NewStream(self._stream_log, owner, route_path(scope), state, body)
        await self._app(scope, receive_and_keep, send)

    async def _resume(self, scope: Scope, receive: Receive, send: Send, owner: str) -> None:
        request = Request(scope, receive)
        event_id = request.headers["last-event-id"]

        def start_again(head: Head, body: bytes, logged: ResumedStream) -> asyncio.Task[int]:
            task = asyncio.create_task(self._continue(scope, head, body, logged))
            self._continued.add(task)
            task.add_done_callback(self._continued.discard)
            return task

        replay = await Replay.connect(self._stream_log, event_id, start_again)
        try:
            await replay.open(owner, route_path(scope))
        except BaseException:
            replay.close()
            raise
        self._stream_log.counts.resumed += 1
        response = await EventStream.open(request, replay)
        await response(scope, receive, send)

    async def _continue(self, scope: Scope, head: Head, body: bytes, logged: ResumedStream) -> int:
        """Run a request of a dead process from where it was. It has no client: followers read the stream log.

        Returns the status of its response.
        """
        logger.info("%s: its HTTP process died; the stream goes on here", head.request_id)
        record = ResponseRecord("POST", head.path, self._logs_requests)
        client = _NoClient(head, body, record)
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_REPEATED]
        state = {"request_id": head.request_id, "record": record, RECORDER: logged}
        if head.response_id:
            state["response_id"] = head.response_id
        again = {**scope, "headers": [*headers, (b"content-type", b"application/json")], "state": state}
        try:
            await self._app(again, client.receive, client.send)
        except Exception as error:
            logger.error("%s: its stream cannot go on: %s", head.request_id, error, exc_info=error)
        finally:
            record.end()
            logged.close()
        if client.status != 200:
            logged.stop(is_final=client.status not in MAY_WORK_ELSEWHERE)
            logger.warning("%s: its stream cannot go on here: status %d", head.request_id, client.status)
        return client.status


class _NoClient:
    """Sends the request of a stream that is continued, disconnects when the response begins, and reads nothing."""

    def __init__(self, head: Head, body: bytes, record: ResponseRecord) -> None:
        self.status = 0
        self._head = head
        self._body = body
        self._record = record
        self._has_sent = False
        self._response_begins = asyncio.Event()

    async def receive(self) -> Message:
        if not self._has_sent:
            self._has_sent = True
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._response_begins.wait()
        return {"type": "http.disconnect"}

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._record.start(self.status, self._head.request_id)
            self._response_begins.set()
        return asyncio.sleep(0)
