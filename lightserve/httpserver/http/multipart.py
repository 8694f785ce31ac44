"""multipart/form-data, read as it arrives: a file may go to the disk, so that its size costs no memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request

from lightserve.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientDisconnectedError,
    InvalidRequestError,
    MediaTypeError,
)
from lightserve.httpserver.http.body import PAGE_HEADERS, JsonObject

FORM_TYPE = "multipart/form-data"
CHUNK_TIMEOUT_S = 30.0  # an upload that stalls must not hold its connection
MAX_HEAD = 8192  # bytes of the headers of a part
MAX_FIELD = 64 * 1024  # bytes of a field that is not the file
MAX_FIELDS = 32
_BOUNDARY = re.compile(r"[^\x00-\x1f\x7f-\uffff]{1,70}")


@dataclass(slots=True)
class Form:
    """The fields of a form. The content of ``file`` is written as it arrives."""

    sink: BinaryIO
    max_bytes: int  # of the file
    limit_flag: str  # the operator's, in errors
    names: str = "the field file"  # what it must have, in errors
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: there is no file
    num_bytes: int = 0  # of the file


def form_schema(required: Sequence[str], properties: JsonObject) -> JsonObject:
    """What /openapi.json says of a route that reads a form with a file."""
    schema = {
        "type": "object",
        "required": ["file", *required],
        "properties": {"file": {"type": "string", "format": "binary"}, **properties},
    }
    return {"requestBody": {"required": True, "content": {FORM_TYPE: {"schema": schema}}}}


async def read_form(request: Request, form: Form) -> Form:
    """Raises a RequestError if the body is not a form or too large."""
    parser = _FormParser(_boundary_of(request, form), form)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > form.max_bytes + MAX_FIELDS * (MAX_FIELD + MAX_HEAD):
        raise _too_large(form)
    async for chunk in _chunks(request):
        parser.feed(chunk)
    parser.end()
    return form


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(CHUNK_TIMEOUT_S):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            yield chunk
    except TimeoutError as error:
        raise BodyTimeoutError(f"nothing of the upload arrived for {CHUNK_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise ClientDisconnectedError("the client closed the connection") from error


def _boundary_of(request: Request, form: Form) -> bytes:
    """A browser sends forms of other sites without asking, so a page needs a key, which makes the browser ask."""
    if not PAGE_HEADERS.isdisjoint(request.headers) and "authorization" not in request.headers:
        raise MediaTypeError("a web page must send the header Authorization with an upload")
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    boundary = header.get_boundary()
    if header.get_content_type() != FORM_TYPE or not boundary or not _BOUNDARY.fullmatch(boundary):
        raise MediaTypeError(f"the body must be {FORM_TYPE}, with {form.names}")
    return boundary.encode()


def _too_large(form: Form) -> BodyTooLargeError:
    return BodyTooLargeError(f"the file is larger than {form.max_bytes} bytes ({form.limit_flag})")


class _FormParser:
    """Gets the body in pieces of any size."""

    def __init__(self, boundary: bytes, form: Form) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._form = form
        self._buffer = bytearray(b"\r\n")  # the first delimiter may begin the body
        self._part: str | None = None  # the field that is being read; None: what is no part
        self._is_file = False
        self._value = bytearray()
        self._has_head = True
        self._has_ended = False

    def feed(self, chunk: bytes) -> None:
        self._buffer += chunk
        while not self._has_ended and (self._read_content() if self._has_head else self._read_head()):
            pass
        if self._has_ended:
            self._buffer.clear()  # what comes after the form has no meaning

    def end(self) -> None:
        if not self._has_ended:
            raise InvalidRequestError("the form is cut off: its last boundary is missing")

    def _read_content(self) -> bool:
        """Whether a part has ended."""
        end = self._buffer.find(self._delimiter)
        known = len(self._buffer) - len(self._delimiter) + 1 if end < 0 else end
        if known > 0:
            self._write(bytes(self._buffer[:known]))
            del self._buffer[:known]
        if end < 0:
            return False
        if len(self._buffer) < len(self._delimiter) + 2:
            return False
        is_last = self._buffer[len(self._delimiter) : len(self._delimiter) + 2] == b"--"
        del self._buffer[: len(self._delimiter)]
        self._end_part()
        self._has_head, self._has_ended = False, is_last
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 and len(self._buffer) <= MAX_HEAD:
            return False
        if end < 0 or end > MAX_HEAD:
            raise InvalidRequestError(f"the headers of a part of the form are longer than {MAX_HEAD} bytes")
        self._begin_part(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        self._has_head = True
        return True

    def _begin_part(self, head: bytes) -> None:
        message = Message()
        for line in head.decode(errors="replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                message["content-disposition"] = value.strip()
        param = message.get_param("name", header="content-disposition")
        name = param if isinstance(param, str) else ""
        if not name:
            raise InvalidRequestError("a part of the form has no name")
        self._part, self._is_file = name, name == "file"
        if self._is_file:
            if self._form.filename is not None:
                raise InvalidRequestError("the form has two files; send one", "file")
            self._form.filename = message.get_filename() or "file"
        elif len(self._form.fields) == MAX_FIELDS:
            raise InvalidRequestError(f"the form has more than {MAX_FIELDS} fields")

    def _write(self, content: bytes) -> None:
        if self._part is None:
            return
        if not self._is_file:
            self._value += content
            if len(self._value) > MAX_FIELD:
                raise InvalidRequestError(f"{self._part[:100]}: longer than {MAX_FIELD} bytes")
            return
        self._form.num_bytes += len(content)
        if self._form.num_bytes > self._form.max_bytes:
            raise _too_large(self._form)
        self._form.sink.write(content)

    def _end_part(self) -> None:
        if self._part is not None and not self._is_file:
            self._form.fields[self._part] = self._value.decode(errors="replace")
        self._part = None
        self._value.clear()
