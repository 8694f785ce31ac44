"""Resumes streams of requests that ask for it with a header, as the chat page does, without --stream_log."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lightserve.httpserver.http.middleware import key_digests
from lightserve.httpserver.http.paths import route_path
from lightserve.httpserver.http.sse import KEEP_ALIVE, RECORDER, EventStream
from lightserve.httpserver.resume.local import LocalRecorder, LocalReplay, LocalStreams
from lightserve.httpserver.resume.records import owner_hash

RESUMABLE = b"x-resumable-stream"


class LocalStreamsMiddleware:
    """It is inside RequestMiddleware, which has checked the key."""

    def __init__(self, app: ASGIApp, streams: LocalStreams) -> None:
        self._app = app
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"]) if scope["type"] == "http" else {}
        if RESUMABLE not in headers or scope["method"] not in ("POST", "DELETE"):
            await self._app(scope, receive, send)
            return
        owner = owner_hash(key_digests(headers))
        if b"last-event-id" in headers:
            await self._answer(scope, receive, send, owner)
            return
        state: MutableMapping[str, Any] = scope["state"]
        state[RECORDER] = LocalRecorder(self._streams, owner, route_path(scope))
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, owner: str) -> None:
        """POST gets the rest of a stream, DELETE ends it."""
        request = Request(scope, receive)
        event_id = request.headers["last-event-id"]
        if scope["method"] == "DELETE":
            self._streams.stop(event_id, owner, route_path(scope))
            await Response(status_code=204)(scope, receive, send)
            return
        replay = LocalReplay(self._streams, event_id, owner, route_path(scope), KEEP_ALIVE)
        response = await EventStream.open(request, replay)
        await response(scope, receive, send)
