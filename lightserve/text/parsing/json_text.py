"""JSON in a stream of text: emits an object while it arrives and finds its end."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from typing import Any

from lightserve.text.parsing.text_stream import Incremental, PlainText, TextStream

CLOSERS = {"{": "}", "[": "]"}
# words are not checked: a client may be able to repair them
_OUTSIDE = PlainText(
    re.compile(r"[ \t\r\n0-9A-Za-z.+\-:,]+"),
    frozenset(f" \t\r\n{string.digits}{string.ascii_letters}.+-:,").issuperset,
)
_CONTROL = [chr(code) for code in range(32)]
_INSIDE = PlainText(
    re.compile(r'(?:[^"\\]+|\\[^\x00-\x1f])+'),  # with whole escape sequences
    frozenset(['"', "\\", *_CONTROL]).isdisjoint,
    {ord(char): json.dumps(char)[1:-1] for char in _CONTROL},
)


def emit_json(stream: TextStream, emit: Callable[[str], None], open_with: str = "") -> Incremental[bool]:
    """Emit an object or array as it arrives. Return whether it was closed. Text that cannot belong to it is not read.

    ``open_with`` are the brackets that were read before. A line break in a string is emitted as its escape sequence:
    models write it unescaped, and clients would reject it.
    """
    closers = [CLOSERS[bracket] for bracket in open_with]
    while True:
        if closers:
            yield from stream.emit_run(_OUTSIDE, emit)
        char = yield from stream.peek()
        if char in CLOSERS:
            closers.append(CLOSERS[char])
        elif not closers or char not in ("}", "]", '"') or (char != '"' and char != closers[-1]):
            return False
        elif char != '"':
            closers.pop()
        stream.position += 1
        emit(char)
        if not closers:
            return True
        if char == '"' and not (yield from _emit_string(stream, emit)):
            return False


def _emit_string(stream: TextStream, emit: Callable[[str], None]) -> Incremental[bool]:
    """Emit the rest of a string, after its first quote."""
    while True:
        yield from stream.emit_run(_INSIDE, emit)
        char = yield from stream.peek()
        stream.position += len(char)
        emit(char)
        if char != "\\":
            return char == '"'
        escaped = yield from stream.peek()
        stream.position += len(escaped)
        emit(escaped)


def read_string(stream: TextStream) -> Incremental[str | None]:
    """The value of the string that comes next; None if none comes."""
    if not (yield from stream.accept('"')):
        return None
    pieces = ['"']
    is_closed = yield from _emit_string(stream, pieces.append)
    value = parse_json("".join(pieces)) if is_closed else None
    return value if isinstance(value, str) else None


def parse_json(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON. Infinity and NaN are not JSON."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
