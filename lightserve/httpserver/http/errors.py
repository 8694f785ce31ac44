"""Errors as clients see them: a status and a JSON body that shows no internals. An API may register its own format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from lightserve.errors import (
    BodyTimeoutError,
    ClientDisconnectedError,
    DeadlineError,
    LightserveError,
    NotComputableError,
    OverloadedError,
    RequestError,
    ServerError,
    UnauthorizedError,
    UnavailableError,
)
from lightserve.httpserver.http.access_log import ResponseRecord
from lightserve.httpserver.http.paths import route_path, suggested_endpoint
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": ["object", "string"],  # a string in the formats of TGI and Ollama
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OPENAPI_ERROR = {"description": "What went wrong", "content": {"application/json": {"schema": _SCHEMA}}}
# responses of every route in /openapi.json
OPENAPI_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _OPENAPI_ERROR, "5XX": _OPENAPI_ERROR}


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How an API writes errors on its path and on all paths below it. The default is OpenAI's: see error_object."""

    path: str
    body: Callable[[int, str, str | None], dict[str, Any]]  # of a status, a message and a request id
    id_header: bytes | None = None  # a header with the request id in every response, in addition to X-Request-Id


def format_of(formats: Sequence[ErrorFormat], path: str) -> ErrorFormat | None:
    """The registered format of a path; None: the default."""
    return next(
        (candidate for candidate in formats if path == candidate.path or path.startswith(f"{candidate.path}/")), None
    )


def error_object(error: Exception, request_id: str | None = None) -> dict[str, Any]:
    """``{"error": {...}}`` for a body or an event. For an error of the server, the message has no details."""
    if isinstance(error, RequestError | NotComputableError | UnavailableError | DeadlineError):
        return _object(error.status, str(error), error.param, error.code)
    status = status_of(error)
    named = "" if request_id is None else f"; the request id is {request_id}"
    return _object(status, f"the server failed to process this request{named}", None, None)


def status_of(error: Exception) -> int:
    return error.status if isinstance(error, LightserveError) else 500


def error_response(
    error: Exception, request_id: str | None = None, error_format: ErrorFormat | None = None
) -> Response:
    if isinstance(error, ClientDisconnectedError):
        return Response(status_code=error.status)  # nobody reads it
    body = _formatted(error_object(error, request_id), status_of(error), request_id, error_format)
    return JSONResponse(body, status_of(error), headers_of(error))


def _formatted(
    body: dict[str, Any], status: int, request_id: str | None, error_format: ErrorFormat | None
) -> dict[str, Any]:
    """``body``, an error in the default format, in the format of the path."""
    return body if error_format is None else error_format.body(status, body["error"]["message"], request_id)


def log_error(error: Exception, request_id: str, record: ResponseRecord | None = None) -> None:
    """Write what an operator must see: server faults, with their traceback. The access log has what clients cause."""
    if isinstance(error, RequestError | DeadlineError):  # the client set the deadline
        if record is not None:
            record.reason = str(error)
        return
    if isinstance(error, UnavailableError):
        logger.info("%s refused: %s", request_id, error)
        return
    if isinstance(error, NotComputableError):  # raised in another process: the traceback here has no information
        logger.error("%s failed: %s", request_id, error)
        return
    logger.error("%s failed: %s", request_id, error, exc_info=error)


def log_stream_error(error: LightserveError, request_id: str) -> None:
    """Write any error: the status of the response is 200, so nothing else shows that it failed."""
    if isinstance(error, RequestError | DeadlineError):
        logger.info("%s failed after its first event (%d): %s", request_id, error.status, error)
    else:
        log_error(error, request_id)


def add_error_handlers(app: FastAPI, formats: Sequence[ErrorFormat] = ()) -> None:
    """Handle what routes raise on purpose. RequestMiddleware handles any other exception."""

    @app.exception_handler(LightserveError)
    async def on_error(request: Request, error: LightserveError) -> Response:
        request_id: str = request.state.request_id
        log_error(error, request_id, request.state.record)
        return error_response(error, request_id, format_of(formats, route_path(request.scope)))

    @app.exception_handler(HTTPException)
    async def on_refused(request: Request, error: HTTPException) -> Response:
        if error.status_code >= 500:
            return await on_error(request, ServerError(error.detail))
        headers = {"Allow": _allowed(app, request)} if error.status_code == 405 else error.headers
        error_format = format_of(formats, route_path(request.scope))
        message = request.state.record.reason = _refusal(app, request, error)
        body = _object(error.status_code, message, None, None)
        return JSONResponse(
            _formatted(body, error.status_code, request.state.request_id, error_format), error.status_code, headers
        )

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(key) for key in first["loc"][1:])  # the first key says where: path, query
        message = request.state.record.reason = f"{param}: {first['msg']}"
        return JSONResponse(_object(400, message, param, None), 400)


def _refusal(app: FastAPI, request: Request, error: HTTPException) -> str:
    """The message for what the framework refuses; the framework's own message may quote the request."""
    if error.status_code == 404:
        return "there is no such endpoint" + _suggestion(app, request)
    if error.status_code == 405:
        return f"the endpoint does not take this method; it takes {_allowed(app, request)}"
    return error.detail


def _suggestion(app: FastAPI, request: Request) -> str:
    path = route_path(request.scope)
    near = suggested_endpoint(app.routes, request.method, path)
    root_path: str = request.scope["path"].removesuffix(path)
    return "" if near is None else f"; did you mean {near[0]} {root_path}{near[1]}?"


def _allowed(app: FastAPI, request: Request) -> str:
    """Every method of the path; the framework lists only the methods of the first route."""
    matching = [
        route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
    ]
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


def _object(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers_of(error: Exception) -> dict[str, str] | None:
    if isinstance(error, UnauthorizedError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, UnavailableError):
        return {"Retry-After": "5"}  # a start or a restart
    if isinstance(error, BodyTimeoutError):
        return {"Connection": "close"}  # else the connection would wait for the missing bytes
    return None
