"""What a format of tool calls is, and what several of them have in common.

A call that breaks before its arguments begin is content after all. Once its name is told it cannot be taken back: then
what should have been its arguments is given out as it was written, up to the call's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightserve.output_parsing.json_text import parsed, pass_json, read_string
from lightserve.output_parsing.scribe import NewId, Scribe, call_id
from lightserve.output_parsing.tape import Steps, Tape

_NAME = re.compile(r"[\w.:/-]{1,256}")

Parse = Callable[[Tape, Scribe], Steps[None]]  # reads the tape to its end


@dataclass(frozen=True, slots=True)
class Wording:
    """A format written out, for a grammar that forces it: calls around ``{name}``, ``{arguments}`` and ``{number}``."""

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    parse: Parse
    signs: tuple[str, ...]  # any of them in a chat template tells that its model uses this format
    markers: tuple[str, ...] = ()  # what may be a special token of the model, and must be seen all the same
    wording: Wording | None = None  # None where the arguments are not JSON
    new_id: NewId = call_id


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def pass_raw(tape: Tape, scribe: Scribe, ends: Sequence[str]) -> Steps[None]:
    """Broken arguments as they are, up to one of ``ends``, which is left unread."""
    end = yield from tape.pass_until(ends, scribe.arguments)
    tape.at -= len(end)


def named_call(tape: Tape, scribe: Scribe, name: str, ends: Sequence[str], given_id: str | None = None) -> Steps[bool]:
    """A call whose arguments come next as a JSON object: False, and the mark stands, where none comes."""
    yield from tape.skip_space()
    if not is_name(name) or (yield from tape.peek()) != "{":
        return False
    tape.unmark()
    scribe.start(name, given_id)
    if not (yield from pass_json(tape, scribe.arguments)):
        yield from pass_raw(tape, scribe, ends)
    return True


def json_calls(tape: Tape, scribe: Scribe, ends: Sequence[str] = (), must_know: bool = False) -> Steps[bool]:
    """One call as a JSON object or several, in a list or one after the other; ``must_know``: only calls of known tools.

    False, and the mark stands, where the first is none.
    """
    yield from tape.skip_space()
    is_list = yield from tape.accept("[")
    if not (yield from _json_call(tape, scribe, ends, must_know)):
        return False
    while True:
        tape.mark()
        if not (yield from _is_another_next(tape)):
            tape.rewind()
            break
        if not (yield from _json_call(tape, scribe, ends, must_know)):
            break
    scribe.content(tape.unmark())
    if is_list:
        yield from tape.accept_next("]")
    return True


def enclosed_calls(tape: Tape, scribe: Scribe, begin: str, end: str, must_know: bool = False) -> Steps[None]:
    """What follows ``begin``, which was read last: ``json_calls`` up to ``end``, or content after all."""
    tape.mark(len(begin))
    if (yield from json_calls(tape, scribe, (end,), must_know)):
        yield from tape.accept_next(end)
    else:
        scribe.content(tape.unmark())


def _is_another_next(tape: Tape) -> Steps[bool]:
    yield from tape.skip_space()
    if not (yield from tape.accept(",")):
        yield from tape.accept(";")
    yield from tape.skip_space()
    return (yield from tape.peek()) == "{"


def _json_call(tape: Tape, scribe: Scribe, ends: Sequence[str], must_know: bool) -> Steps[bool]:
    """An object with a name and arguments, whose arguments are given out as they come where the name is the first."""
    begin = tape.n_marked
    name = yield from _head(tape)
    if name is not None and _is_wanted(name, scribe, must_know):
        tape.unmark()
        scribe.start(name)
        if not (yield from pass_json(tape, scribe.arguments)):
            yield from pass_raw(tape, scribe, ends)
        elif not (yield from tape.accept_next("}")) and (yield from tape.accept(",")):
            yield from pass_json(tape, _drop, open_with="{")
        return True
    tape.rewind(begin)
    pieces: list[str] = []
    if not (yield from pass_json(tape, pieces.append)):
        return False
    call = _call_of(parsed("".join(pieces)))
    if call is None or not _is_wanted(call[0], scribe, must_know):
        return False
    tape.unmark()
    scribe.call(*call)
    return True


def _is_wanted(name: str, scribe: Scribe, must_know: bool) -> bool:
    return name in scribe.tools if must_know else bool(name)


def _drop(text: str) -> None:
    """Members of a call that nobody asked for."""


def _head(tape: Tape) -> Steps[str | None]:
    """The name in ``{"name": ..., "arguments": {``, read up to the last brace; None where it is written otherwise."""
    for literal in ("{", '"name"', ":"):
        if not (yield from tape.accept_next(literal)):
            return None
    yield from tape.skip_space()
    name = yield from read_string(tape)
    if not name or not (yield from tape.accept_next(",")):
        return None
    if not (yield from tape.accept_next('"arguments"')) and not (yield from tape.accept('"parameters"')):
        return None
    if not (yield from tape.accept_next(":")):
        return None
    yield from tape.skip_space()
    return name if (yield from tape.peek()) == "{" else None


def _call_of(value: Any) -> tuple[str, Any] | None:
    """Name and arguments, in whatever order; arguments may be JSON in a string, or missing."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, dict) or (isinstance(arguments, str) and isinstance(parsed(arguments), dict)):
        return value["name"], arguments
    return None
