"""A request body, read within limits, parsed and checked once."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from lightserve.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientGoneError,
    InvalidRequestError,
    MediaTypeError,
)

B = TypeVar("B", bound="Body")

BODY_TIMEOUT_S = 30.0  # a body that never ends must not hold a connection for ever


class Body(BaseModel):
    """Unknown fields are let through: clients send what other servers know. A bool is no number, a string neither."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object."""
    _check_media_type(request.headers.get("content-type"))
    raw = await _read(request, max_bytes)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def check(model: type[B], value: dict[str, Any]) -> B:
    """``value`` as a ``model``; the error names the first field that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"{param}: {first['msg']}" if param else first["msg"], param or None) from error


def _check_media_type(content_type: str | None) -> None:
    kind, _, rest = (content_type or "").lower().partition(";")
    charset = rest.partition("charset=")[2].strip().strip('"')
    if kind.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise MediaTypeError("the body must be application/json in UTF-8; set the header Content-Type")


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > max_bytes:
        raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise ClientGoneError("the client closed the connection") from error
    return b"".join(chunks)
