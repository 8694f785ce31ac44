"""The spans of one HTTP request: request, images if it has some, queue, prefill, decode.

Everything is taken from the access log of the request when it ends. A token costs nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lightserve.errors import LightserveError
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.paths import route_path

AttributeValue = str | int | list[str]

# gen_ai.operation.name of the semantic conventions, by route; all others complete text
_CHAT_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
_PREFIX = "lightserve."  # of attributes that the conventions do not have
UNMATCHED = "unmatched"  # in place of a path that is none of this server: clients may choose any
MAX_TEXT = 200  # characters of an attribute
MAX_REASONS = 128  # of one request; a request for embeddings has one for each text
_SAMPLED = 0x01  # of the flags
_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_INVALID_VERSION, _FIRST_VERSION = b"ff", b"00"


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    begin_s: float  # time.monotonic()
    end_s: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """The spans of one request. The first one is the parent of the others."""

    context: TraceContext
    span_id: bytes  # of the first span
    spans: list[Span]


Export = Callable[[TraceRecord], None]


class RequestTrace:
    def __init__(self, header: bytes, model: str, export: Export) -> None:
        self.context = trace_context(header)
        self.span_id = os.urandom(8)
        self._status = 0
        self._request_id = ""
        self._route = UNMATCHED
        self._model = model[:MAX_TEXT]
        self._export = export
        self._begin_s = time.monotonic()
        self._responded_s: float | None = None
        self._log: AccessLog | None = None
        self._closed_s: float | None = None  # when the generation ended
        self._error: BaseException | None = None

    def watch(self, log: AccessLog) -> None:
        """``log`` belongs to this request."""
        self._log = log
        log.on_close = self._on_generation_closed

    def response_sent(self, status: int, request_id: str, route: str) -> None:
        """``status`` is 0 if none was sent. A response in the background is traced when it ends."""
        self._responded_s, self._status = time.monotonic(), status
        self._request_id, self._route = request_id[:MAX_TEXT], route
        if self._log is None or not self._log.is_generating:
            self._finish()

    def _on_generation_closed(self, error: BaseException | None) -> None:
        self._closed_s, self._error = time.monotonic(), error
        if self._responded_s is not None:
            self._finish()

    def _finish(self) -> None:
        if not self.context.is_sampled:
            return
        end_s = max(self._responded_s or 0.0, self._closed_s or 0.0)
        is_error = self._status >= 500 or self._status == 0 or isinstance(self._error, LightserveError)
        request = Span(f"POST {self._route}", self._begin_s, end_s, self._attributes(), is_error)
        phases = [] if self._log is None or self._closed_s is None else _phases(self._log, self._closed_s)
        self._export(TraceRecord(self.context, self.span_id, [request, *phases]))

    def _attributes(self) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "http.request.method": "POST",
            "http.route": self._route,
            "http.response.status_code": self._status,
            f"{_PREFIX}request_id": self._request_id,
        }
        log = self._log
        if log is None:
            return attributes
        if isinstance(self._error, LightserveError):
            attributes["error.type"] = type(self._error).__name__
        return attributes | {
            "gen_ai.operation.name": "chat" if self._route in _CHAT_ROUTES else "text_completion",
            "gen_ai.provider.name": "lightserve",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": log.finish_reasons(self._error)[:MAX_REASONS],
            **_input(log),
            **_output(log),
        }


def _input(log: AccessLog) -> dict[str, AttributeValue]:
    of_images: dict[str, AttributeValue] = {f"{_PREFIX}image_tokens": log.image_tokens} if log.image_tokens else {}
    return {
        "gen_ai.usage.input_tokens": log.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": log.cached_tokens,
        **of_images,
    }


def _output(log: AccessLog) -> dict[str, AttributeValue]:
    return {"gen_ai.usage.output_tokens": log.output_tokens}


def _phases(log: AccessLog, closed_s: float) -> list[Span]:
    """With several choices: until the last one was admitted, until the first token, until the last token."""
    if log.first_token_s is None:  # it ended in the queue or while its prompt was computed
        return [Span("queue", log.arrived_s, closed_s, is_error=True)]
    first_token_s = log.arrived_s + log.first_token_s
    admitted_s = min(log.arrived_s + log.queue_s, first_token_s)
    images = [] if log.images_read_s is None else [Span("images", *log.images_read_s)]
    return [
        *images,
        Span("queue", log.arrived_s, admitted_s),
        Span("prefill", admitted_s, first_token_s, _input(log)),
        Span("decode", first_token_s, closed_s, _output(log)),
    ]


class TraceMiddleware:
    """Traces every POST request, and returns ``traceparent``. It is only in the application if traces are exported.

    ``paths``: those of routes. A request that is refused before it has a route may have one of them.
    """

    def __init__(self, app: ASGIApp, model: str, export: Export, paths: Collection[str]) -> None:
        self._app = app
        self._model = model
        self._export = export
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        header = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        trace = RequestTrace(header, self._model, self._export)
        state = scope.setdefault("state", {})
        state["trace"] = trace
        # RequestMiddleware adds them: a wrapper of ``send`` would cost every chunk of a stream a call
        state["response_headers"] = [(b"traceparent", trace.context.header(trace.span_id))]
        try:
            await self._app(scope, receive, send)
        finally:
            trace.response_sent(state.get("status", 0), state.get("request_id", ""), self._route_of(scope))

    def _route_of(self, scope: Scope) -> str:
        """The path of the route as it is declared, such as /v1/responses/{response_id}/cancel."""
        route = scope.get("route")
        if isinstance(route, Route):
            return route.path
        path = route_path(scope)
        return path if path in self._paths else UNMATCHED


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: bytes  # 16 bytes
    parent_id: bytes  # 8 bytes; empty: this request begins the trace
    is_sampled: bool  # the caller records this trace

    def header(self, span_id: bytes) -> bytes:
        """The header of the response: ``span_id`` is the span of this server."""
        return f"00-{self.trace_id.hex()}-{span_id.hex()}-{int(self.is_sampled):02x}".encode()


def trace_context(header: bytes) -> TraceContext:
    """The trace of a request. A header that is missing or invalid begins a new trace, as the standard says."""
    match = _HEADER.fullmatch(header.strip())
    if match is None or not _is_valid(*match.groups()):
        return TraceContext(os.urandom(16), b"", is_sampled=True)
    _, trace_id, parent_id, flags, _ = match.groups()
    return TraceContext(
        bytes.fromhex(trace_id.decode()), bytes.fromhex(parent_id.decode()), bool(int(flags, 16) & _SAMPLED)
    )


def _is_valid(version: bytes, trace_id: bytes, parent_id: bytes, flags: bytes, rest: bytes | None) -> bool:
    if version == _INVALID_VERSION or (version == _FIRST_VERSION and rest is not None):
        return False
    return any(byte != ord("0") for byte in trace_id) and any(byte != ord("0") for byte in parent_id)
