"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

from lightserve.httpserver.http.errors import ErrorFormat

PATH = "/v1/messages"

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def thread_error(request_id: str) -> dict[str, Any]:
    """Anthropic's client sends the whole conversation in every request after an error with these details."""
    body = anthropic_error(400, "thread: this server stores no messages; send the whole conversation", request_id)
    body["error"]["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return body


ERROR_FORMAT = ErrorFormat(PATH, anthropic_error, id_header=b"request-id")  # Anthropic's client reads this header
