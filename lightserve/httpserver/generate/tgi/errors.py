"""Errors in TGI's format: its clients raise the exceptions that they raise with TGI."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import AbortedError, LightserveError, OverloadedError, RequestError, UnavailableError
from lightserve.httpserver.http.body import json_response
from lightserve.httpserver.http.errors import error_object, headers_of, log_error

INVALID = 422
FAILED = 424
INCOMPLETE = 500


def tgi_error_object(error: LightserveError, request_id: str) -> tuple[int, dict[str, Any]]:
    """The status and ``{"error", "error_type"}``."""
    if isinstance(error, OverloadedError):
        return error.status, _object("Model is overloaded", "overloaded")
    if isinstance(error, AbortedError):
        return INCOMPLETE, _object(f"Incomplete generation: {error}", "incomplete_generation")
    if isinstance(error, RequestError):
        status = INVALID if error.status == RequestError.status else error.status
        return status, _object(f"Input validation error: {error}", "validation")
    if isinstance(error, UnavailableError):
        return error.status, _object(str(error), "generation")
    message = error_object(error, request_id)["error"]["message"]
    return FAILED, _object(f"Request failed during generation: {message}", "generation")


def tgi_error_response(error: LightserveError, request: Request) -> Response:
    request_id: str = request.state.request_id
    log_error(error, request_id, request.state.record)
    status, body = tgi_error_object(error, request_id)
    return json_response(body, headers_of(error), status)


def _object(message: str, kind: str) -> dict[str, Any]:
    return {"error": message, "error_type": kind}
