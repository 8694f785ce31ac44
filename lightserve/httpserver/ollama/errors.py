"""Errors in Ollama's format."""

from __future__ import annotations

from typing import Any

from lightserve.httpserver.http.errors import ErrorFormat

PATH = "/api"


def ollama_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    return {"error": message}


ERROR_FORMAT = ErrorFormat(PATH, ollama_error)
