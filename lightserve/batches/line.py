"""The lines of a batch: one request each, as JSON. Errors have the code and the line number that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/score",
    "/v1/rerank",
)
MAX_LINES = 50_000
MAX_ERRORS = 100  # listed of one file
MAX_CUSTOM_ID = 512  # characters
MAX_DEPTH = 250  # levels of a body; orjson reads more than it writes: 254


class NumberedLine(NamedTuple):
    number: int  # the first line of the file is 1
    text: bytes


@dataclass(frozen=True, slots=True)
class LineRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """A line is not a request that can be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(slots=True)
class FileCheck:
    """What a file of requests has."""

    num_lines: int
    errors: list[dict[str, Any]]  # OpenAI's objects, the first MAX_ERRORS


def read_lines(path: Path) -> Iterator[NumberedLine]:
    """All lines that are not blank."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield NumberedLine(number, text)


def parse_line(text: bytes, endpoint: str | None = None) -> LineRequest:
    """``endpoint``: of the batch; None: lines may have different ones."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"this line is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError("invalid_json_line", "this line is not a JSON object")
    custom_id = _custom_id(value.get("custom_id"))
    if value.get("method", "POST") != "POST":
        raise LineError("invalid_method", f"method is {_shown(value['method'])}; it must be POST", "method")
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body is {_shown(body)}; it must be the JSON object of a request", "body")
    _check_body(body)
    return LineRequest(custom_id, _url(value.get("url"), endpoint), body)


def is_too_deep(body: dict[str, Any]) -> bool:
    """Whether it has more than MAX_DEPTH levels."""
    try:
        orjson.dumps([[[[body]]]])
    except orjson.JSONEncodeError:
        return True
    return False


def check_file(path: Path, endpoint: str | None, max_line_bytes: int) -> FileCheck:
    """Check every line, for ``parse_line``. Reads the file once; holds one line and the custom ids."""
    check = FileCheck(0, [])
    first_lines: dict[str, int] = {}
    for number, text in read_lines(path):
        check.num_lines += 1
        try:
            if check.num_lines > MAX_LINES:
                raise LineError("too_many_requests", f"the file has more than {MAX_LINES} requests; split it")
            _check_line(number, text, endpoint, max_line_bytes, first_lines)
        except LineError as error:
            check.errors.append(_error_object(error, number))
            if len(check.errors) == MAX_ERRORS or check.num_lines > MAX_LINES:
                break
    if check.num_lines == 0:
        check.errors.append(_error_object(LineError("empty_file", "the file has no requests"), None))
    return check


def _check_line(number: int, text: bytes, endpoint: str | None, max_bytes: int, first_lines: dict[str, int]) -> None:
    if len(text) > max_bytes:
        problem = f"this line has {len(text)} bytes; the limit is {max_bytes} (--max_body_bytes)"
        raise LineError("line_too_long", problem)
    request = parse_line(text, endpoint)
    if is_too_deep(request.body):
        raise LineError("invalid_body", f"body has more than {MAX_DEPTH} levels of objects and lists", "body")
    custom_id = request.custom_id
    first = first_lines.setdefault(custom_id, number)
    if first != number:
        problem = f"custom_id {_shown(custom_id)} is used by line {first} already; use each once"
        raise LineError("duplicate_custom_id", problem, "custom_id")


def _custom_id(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID:
        problem = f"custom_id is {_shown(value)}; it must be a string of 1 to {MAX_CUSTOM_ID} characters"
        raise LineError("invalid_custom_id", problem, "custom_id")
    return value


def _url(url: Any, endpoint: str | None) -> str:
    if url not in ENDPOINTS:
        raise LineError("invalid_url", f"url is {_shown(url)}; it must be one of {', '.join(ENDPOINTS)}", "url")
    if endpoint is not None and url != endpoint:
        problem = f"url is {_shown(url)}, but the endpoint of the batch is {endpoint!r}"
        raise LineError("mismatched_endpoint", problem, "url")
    return str(url)


def _check_body(body: dict[str, Any]) -> None:
    for name in ("stream", "background"):
        if body.get(name):
            raise LineError("invalid_body", f"{name} is set; the results of a batch are in its files", f"body.{name}")


def _error_object(error: LineError, number: int | None) -> dict[str, Any]:
    return {"code": error.code, "line": number, "message": str(error), "param": error.param}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
