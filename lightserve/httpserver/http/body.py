"""Request bodies: read within limits, parsed, validated; and JSON as the body of a response."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from lightserve.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientDisconnectedError,
    InvalidRequestError,
    MediaTypeError,
)
from lightserve.httpserver.http.validation_errors import invalid_request

B = TypeVar("B", bound="Body")
JsonObject = dict[str, Any]

BODY_TIMEOUT_S = 30.0  # a body that never ends must not hold its connection
LARGE_BODY = 256 * 1024  # bytes; a larger one (about a millisecond) is parsed in a thread
# 16 MB can hold 5 million lists, which take seconds to parse: check_json_size refuses them before
MAX_PARTS = 2**17  # strings, lists and objects
MAX_VALUES = 2_000_000  # token ids, mostly
PAGE_HEADERS = frozenset({"origin", "sec-fetch-site"})  # a browser sets one of them for a request of a web page
_STRING = re.compile(rb'"[^"]*"')


class Body(BaseModel):
    """Unknown fields are allowed: clients send fields of other servers. Types are strict: a bool is not a number.

    The validator of a class is built for its first body, which takes 1 to 15 ms: all 153 of them would be a quarter
    second of every start, and a server is asked for few of them. Those that most clients send are built in main.py.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    other_fields: ClassVar[frozenset[str]] = frozenset()  # unknown fields with a meaning: see unknown_fields.py


def at_most(count: int) -> BeforeValidator:
    """Limits the entries of a dict. pydantic's max_length counts valid entries only: a million bad ones would be a
    million errors. Lists have fail_fast instead.
    """

    def check_length(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"at most {count} entries, found {len(value)}")
        return value

    return BeforeValidator(check_length)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    ``curl -d`` declares a form, so another Content-Type is accepted, except from a web page: with application/json the
    browser first asks this server (CORS) whether the page may send the request.
    """
    kind, is_utf8 = _media_type(request.headers.get("content-type", ""))
    is_declared = kind == "application/json"
    if not is_utf8 or (not is_declared and not PAGE_HEADERS.isdisjoint(request.headers)):
        raise MediaTypeError("the body must be application/json in UTF-8; set the header Content-Type")
    _check_encoding(request.headers.get("content-encoding"))
    raw = await _read(request, max_bytes)
    try:
        return _parse(raw) if len(raw) <= LARGE_BODY else await asyncio.to_thread(_parse, raw)
    except InvalidRequestError as error:
        if is_declared:
            raise
        raise MediaTypeError(f"{error}; send JSON in UTF-8 with the header Content-Type: application/json") from error


def validate(model: type[B], value: dict[str, Any]) -> B:
    """``value`` as a ``model``; an error names the first wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error, value) from error


@dataclass(frozen=True, slots=True)
class BodyModels:
    """A body that is one of ``models``. Its description takes long, so it is made when a client asks for it."""

    models: tuple[type[Body], ...]
    is_required: bool

    def described(self) -> dict[str, Any]:
        schemas = [_schema_of(model) for model in self.models]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return {"required": self.is_required, "content": {"application/json": {"schema": schema}}}


def openapi_body(*models: type[Body], is_required: bool = True) -> dict[str, Any]:
    """For the openapi_extra of a route whose body is one of ``models``; see ``with_schemas``."""
    return {"requestBody": BodyModels(models, is_required)}


def with_schemas(openapi_extra: dict[str, Any]) -> dict[str, Any]:
    """What /openapi.json says: JSON schemas in place of the models."""
    return {key: value.described() if isinstance(value, BodyModels) else value for key, value in openapi_extra.items()}


@cache  # several endpoints have the same body
def _schema_of(model: type[Body]) -> Any:
    return _without_references(model.model_json_schema())


def _without_references(schema: dict[str, Any]) -> Any:
    """Replace references by their definitions: they would not resolve in /openapi.json."""
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"].rpartition("/")[2]])
        return {key: inlined(item) for key, item in node.items()}

    return inlined(schema)


def _media_type(content_type: str) -> tuple[str, bool]:
    """The type that the header Content-Type declares, and whether its charset is UTF-8, the default."""
    kind, *params = content_type.lower().split(";")
    pairs = [param.partition("=") for param in params]
    charsets = {value.strip().strip('"') for name, _, value in pairs if name.strip() == "charset"}
    return kind.strip(), charsets <= {"utf-8", "utf8"}


def _check_encoding(encoding: str | None) -> None:
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise MediaTypeError(f"the body must not be compressed; Content-Encoding is {encoding[:100]!r}")


def _parse(raw: bytes) -> dict[str, Any]:
    check_json_size(raw)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def check_json_size(raw: bytes) -> None:
    """Refuse JSON that would take long to parse. Strings are only removed where the raw counts are over the limits."""
    if len(raw) <= LARGE_BODY:
        return
    if raw.count(b'"') + _openings(raw) <= MAX_PARTS and raw.count(b",") <= MAX_VALUES:
        return
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    strings = bare.count(b'"') // 2
    if strings <= MAX_PARTS:
        bare = _STRING.sub(b"", bare)
    if strings + _openings(bare) > MAX_PARTS:
        raise InvalidRequestError(f"the body has more than {MAX_PARTS} strings, lists and objects")
    if bare.count(b",") > MAX_VALUES:
        raise InvalidRequestError(f"the body has more than {MAX_VALUES} values")


def _openings(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > max_bytes:
        raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes (--max_body_bytes)")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes (--max_body_bytes)")
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise ClientDisconnectedError("the client closed the connection") from error
    return b"".join(chunks)


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
