"""Errors as Anthropic tells them."""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages"  # and all below it

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


def is_anthropic(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
