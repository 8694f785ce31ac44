"""Errors as clients see them: OpenAI's shape, Anthropic's below its path, and nothing that is not theirs to know."""

from __future__ import annotations

from collections.abc import Mapping
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
from lightserve.httpserver.messages_errors import anthropic_error, is_anthropic
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
# sentences for what the framework refuses; its own words may quote the request
SENTENCES = {404: "there is no such endpoint", 405: "the endpoint does not take this method"}

_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": ["object", "string"],  # a sentence where TGI's shape is answered
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_DOCUMENTED = {"description": "What went wrong", "content": {"application/json": {"schema": _SCHEMA}}}
# for every route in /openapi.json
DOCUMENTED: dict[int | str, dict[str, Any]] = {"4XX": _DOCUMENTED, "5XX": _DOCUMENTED}


def error_object(error: Exception, request_id: str | None = None) -> dict[str, Any]:
    """``{"error": {...}}`` for a body or an event. What is our fault is told without detail, but for what to expect."""
    if isinstance(error, RequestError | NotComputableError | UnavailableError | DeadlineError):
        return _object(error.status, str(error), error.param, error.code)
    status = status_of(error)
    named = "" if request_id is None else f"; the request's id is {request_id}"
    return _object(status, f"the server failed to answer this request{named}", None, None)


def status_of(error: Exception) -> int:
    return error.status if isinstance(error, LightserveError) else 500


def error_response(error: Exception, request_id: str | None = None, path: str = "") -> Response:
    if isinstance(error, ClientDisconnectedError):
        return Response(status_code=error.status)  # nobody reads it
    return _response(path, request_id, status_of(error), error_object(error, request_id), headers_of(error))


def _response(
    path: str, request_id: str | None, status: int, found: dict[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """``found`` in the shape of the path."""
    if is_anthropic(path):
        found = anthropic_error(status, found["error"]["message"], request_id)
    return JSONResponse(found, status, headers)


def log_error(error: Exception, request_id: str) -> None:
    """Writes what an operator must see: our faults, with their traceback."""
    if isinstance(error, RequestError | DeadlineError):  # the client chose its deadline
        return
    if isinstance(error, UnavailableError):
        logger.info("%s refused: %s", request_id, error)
        return
    if isinstance(error, NotComputableError):  # it came from another process: the traceback would say nothing
        logger.error("%s failed: %s", request_id, error)
        return
    logger.error("%s failed: %s", request_id, error, exc_info=error)


def add_error_handlers(app: FastAPI) -> None:
    """For what routes raise on purpose. Anything else reaches the middleware, which knows the request's id."""

    @app.exception_handler(LightserveError)
    async def on_error(request: Request, error: LightserveError) -> Response:
        request_id: str = request.state.request_id
        log_error(error, request_id)
        return error_response(error, request_id, request.url.path)

    @app.exception_handler(HTTPException)
    async def on_refused(request: Request, error: HTTPException) -> Response:
        if error.status_code >= 500:
            return await on_error(request, ServerError(error.detail))
        message = SENTENCES.get(error.status_code, error.detail)
        headers = _allow(app, request) if error.status_code == 405 else error.headers
        found = _object(error.status_code, message, None, None)
        return _response(request.url.path, request.state.request_id, error.status_code, found, headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])  # the first part says where: path, query
        return JSONResponse(_object(400, f"{param}: {first['msg']}", param, None), 400)


def _allow(app: FastAPI, request: Request) -> dict[str, str]:
    """Every method of the path. The framework names those of its first route only."""
    matching = [
        route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
    ]
    return {"Allow": ", ".join(sorted({method for route in matching for method in route.methods or ()}))}


def _object(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers_of(error: Exception) -> dict[str, str] | None:
    if isinstance(error, UnauthorizedError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, OverloadedError):
        return {"Retry-After": "1"}  # a step takes milliseconds: a second empties some of the queue
    if isinstance(error, UnavailableError):
        return {"Retry-After": "5"}  # a start or a restart
    if isinstance(error, BodyTimeoutError):
        return {"Connection": "close"}  # or what is missing could still come, for ever
    return None
