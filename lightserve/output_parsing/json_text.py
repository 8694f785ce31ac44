"""JSON in a stream of text: where an object ends, without waiting for its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from lightserve.output_parsing.tape import Steps, Tape

CLOSERS = {"{": "}", "[": "]"}
_OUTSIDE = re.compile(r"[ \t\r\n0-9A-Za-z.+\-:,]*")  # words are not looked at: a client may be able to mend them
_INSIDE = re.compile(r'[^"\\\x00-\x1f]*')


def pass_json(tape: Tape, give: Callable[[str], None], open_with: str = "") -> Steps[bool]:
    """Give out an object or array as it comes: whether it was closed. What cannot belong to it is left unread.

    ``open_with`` are the brackets that were read before. A line break in a string is given out as its escape: models
    write them bare, and clients would refuse them.
    """
    closers = [CLOSERS[bracket] for bracket in open_with]
    while True:
        if closers:
            yield from tape.pass_run(_OUTSIDE, give)
        char = yield from tape.peek()
        if char in CLOSERS:
            closers.append(CLOSERS[char])
        elif not closers or char not in ("}", "]", '"') or (char != '"' and char != closers[-1]):
            return False
        elif char != '"':
            closers.pop()
        tape.at += 1
        give(char)
        if not closers:
            return True
        if char == '"' and not (yield from _pass_string(tape, give)):
            return False


def _pass_string(tape: Tape, give: Callable[[str], None]) -> Steps[bool]:
    """The rest of a string, after its first quote."""
    while True:
        yield from tape.pass_run(_INSIDE, give)
        char = yield from tape.peek()
        if not char:
            return False
        tape.at += 1
        give(char if char in '"\\' else json.dumps(char)[1:-1])
        if char == '"':
            return True
        if char == "\\":
            give((yield from tape.peek()))
            tape.at = min(tape.at + 1, len(tape.text))


def read_string(tape: Tape) -> Steps[str | None]:
    """The value of the string that comes next; None where it is none."""
    if not (yield from tape.accept('"')):
        return None
    pieces = ['"']
    is_closed = yield from _pass_string(tape, pieces.append)
    value = parsed("".join(pieces)) if is_closed else None
    return value if isinstance(value, str) else None


def parsed(text: str) -> Any:
    """The value of a JSON text; None where it is none. Infinities and the like are no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
