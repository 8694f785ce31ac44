"""The input of custom tools, decoded while the JSON of their calls arrives.

The model calls a function with one string argument: {"input": "..."}. The client gets the string itself.
"""

from __future__ import annotations

import enum
import json
import re

from lightserve.httpserver.chat.tools import INPUT
from lightserve.text.parsing import CallArguments, CallStart, Delta

_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_LONGEST_BEGIN = 64  # characters, with white space; other arguments are decoded when they are complete
_SHORTEST_BEGIN = f'{{"{INPUT}":"'
# whole characters and escapes; the first half of a surrogate pair waits for the second
_COMPLETE = re.compile(
    r'(?:[^"\\]|\\u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?![dD][89abAB])[0-9a-fA-F]{4})|\\[^u])*'
)
_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL
)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class _State(enum.Enum):
    BEFORE = "before the string"
    INSIDE = "inside the string"
    AFTER = "after the string"
    OTHER = "the arguments are not a single string"


class CustomToolInput:
    def __init__(self) -> None:
        self._unread = ""
        self._state = _State.BEFORE

    def push(self, text: str) -> str:
        """More of the arguments. Return more of the input."""
        if self._state in (_State.AFTER, _State.OTHER):
            return ""
        self._unread += text
        if self._state is _State.BEFORE:
            self._find_begin()
        return self._read() if self._state is _State.INSIDE else ""

    def finish(self, arguments: str) -> str:
        """The arguments are complete. Return the rest of the input."""
        match self._state:
            case _State.AFTER:
                return ""
            case _State.INSIDE:  # truncated, or with an escape that is not JSON
                return _decoded(_match(_STRING, self._unread))
        return _input_of(arguments)

    def _find_begin(self) -> None:
        begin = _BEGIN.match(self._unread)
        if begin is not None:
            self._state = _State.INSIDE
            self._unread = self._unread[begin.end() :]
        elif len(self._unread) > _LONGEST_BEGIN or not _SHORTEST_BEGIN.startswith("".join(self._unread.split())):
            self._state = _State.OTHER

    def _read(self) -> str:
        whole = _match(_COMPLETE, self._unread)
        self._unread = self._unread[len(whole) :]
        if self._unread.startswith('"'):
            self._state = _State.AFTER
        return _decoded(whole)


class CustomCallDecoder:
    """Gives the calls of custom tools with their input in place of their arguments."""

    def __init__(self, names: frozenset[str]) -> None:
        """``names``: of the custom tools."""
        self._names = names
        self._index = 0  # of the open call
        self._input: CustomToolInput | None = None  # of the open call, if its tool is custom
        self._arguments: list[str] = []

    def decode(self, deltas: list[Delta], is_end: bool) -> list[Delta]:
        """The same deltas. ``is_end``: the output has ended."""
        decoded: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, CallArguments) and self._input is not None:
                self._arguments.append(delta.text)
                self._add_input(self._input.push(delta.text), decoded)
            else:
                self._end_call(decoded)
                decoded.append(self._start_call(delta) if isinstance(delta, CallStart) else delta)
        if is_end:
            self._end_call(decoded)
        return decoded

    def _start_call(self, start: CallStart) -> CallStart:
        if start.name not in self._names:
            return start
        self._index, self._input, self._arguments = start.index, CustomToolInput(), []
        return CallStart(start.index, start.id, start.name, is_custom=True)

    def _end_call(self, decoded: list[Delta]) -> None:
        if self._input is not None:
            self._add_input(self._input.finish("".join(self._arguments)), decoded)
            self._input = None

    def _add_input(self, text: str, decoded: list[Delta]) -> None:
        if text:
            decoded.append(CallArguments(self._index, text, is_custom=True))


def _match(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.match(text)
    return "" if match is None else match[0]


def _decoded(string: str) -> str:
    """A JSON string without its quotes. An escape that JSON does not know stays as it is."""
    return _ESCAPE.sub(_unescape, string) if "\\" in string else string


def _unescape(escape: re.Match[str]) -> str:
    high, low, single, character = escape.groups()
    if high is not None:
        return (bytes.fromhex(high) + bytes.fromhex(low)).decode("utf-16-be")
    if single is not None:
        return bytes.fromhex(single).decode("utf-16-be", errors="replace")
    return _ESCAPED.get(character, f"\\{character}")


def _input_of(arguments: str) -> str:
    """The argument ``input``, or the only argument, or all arguments as they are."""
    try:
        value = json.loads(arguments, strict=False)
    except ValueError:
        return arguments
    if not isinstance(value, dict):
        return arguments
    argument = value.get(INPUT, next(iter(value.values())) if len(value) == 1 else None)
    return argument if isinstance(argument, str) else arguments
