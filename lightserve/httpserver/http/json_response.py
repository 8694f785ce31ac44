"""Responses whose body is JSON."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
