"""Python calls, which are parsed, never executed.

Llama 3.2 and 4: the whole output is a list, ``[f(a=1), g()]``. LFM2 and Olmo 3: the calls are between two markers.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, PlainText, TextStream
from lightserve.text.parsing.tool_calls.base import ToolFormat, add_no_call

START, END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 64  # nested brackets: Python's parser and the code below recurse
CLOSERS = {"(": ")", "[": "]", "{": "}"}
WORDS = {"true": True, "false": False, "null": None}  # JSON's words, which models mix in
_PLAIN = PlainText(re.compile(r"[^()\[\]{}'\"]+"), frozenset("()[]{}'\"").isdisjoint)
_QUOTED = {quote: PlainText(re.compile(rf"[^{quote}\\]+"), frozenset(f"{quote}\\").isdisjoint) for quote in "'\""}


def parse(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    stream.mark()
    yield from stream.skip_space()
    yield from stream.accept(START)
    if (yield from stream.accept_after_space("[")):
        yield from _parse_calls(stream, writer)
    if writer.has_calls:
        add_no_call(stream, writer)
    else:  # any list may begin like this
        writer.add_content(stream.take_marked())
    yield from stream.emit_until((), writer.add_content)


def _parse_calls(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    """Text that is still marked at the end is content."""
    while (yield from _parse_call(stream, writer)):
        stream.mark()
        if (yield from stream.accept_after_space("]")):
            stream.take_marked()
            yield from stream.accept_end(END)
            return
        if not (yield from stream.accept(",")):
            return


@dataclass(frozen=True, slots=True)
class PythonBetween:
    """Calls between two markers, in a list or on separate lines."""

    begin: str
    end: str

    def parse(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        while (yield from stream.emit_until((self.begin,), writer.add_content)):
            stream.mark(len(self.begin))
            yield from stream.accept_after_space("[")
            yield from self._parse_calls(stream, writer)
            add_no_call(stream, writer)

    def _parse_calls(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        """Text that is still marked at the end is content."""
        while (yield from _parse_call(stream, writer, known_tools_only=False)):
            stream.mark()
            yield from stream.accept_after_space(",")
            yield from stream.accept_after_space("]")
            if (yield from stream.accept_end(self.end)):
                stream.take_marked()
                return


def _parse_call(stream: TextStream, writer: DeltaWriter, known_tools_only: bool = True) -> Incremental[bool]:
    """A list in brackets is not always a list of calls: there, only known tools count."""
    yield from stream.skip_space()
    text = yield from _read_call(stream)
    call = _call_of(text) if text else None
    if call is None or (known_tools_only and call[0] not in writer.tools):
        return False
    stream.take_marked()
    writer.add_call(*call)
    return True


def _read_call(stream: TextStream) -> Incremental[str]:
    """The text up to the bracket that closes the first one; "" if none does."""
    pieces: list[str] = []
    closers: list[str] = []
    while True:
        yield from stream.emit_run(_PLAIN, pieces.append)
        char = yield from stream.peek()
        stream.position += len(char)
        pieces.append(char)
        if char in CLOSERS:
            closers.append(CLOSERS[char])
        elif char in _QUOTED:
            pieces.append((yield from _read_quoted(stream, char)))
        elif closers and char == closers[-1]:
            closers.pop()
        else:
            return ""
        if not closers or len(closers) > MAX_DEPTH:
            return "" if closers else "".join(pieces)


def _read_quoted(stream: TextStream, quote: str) -> Incremental[str]:
    """The rest of a string; a quote after a backslash does not end it."""
    pieces: list[str] = []
    while True:
        yield from stream.emit_run(_QUOTED[quote], pieces.append)
        char = yield from stream.peek()
        stream.position += len(char)
        pieces.append(char)
        if char != "\\":
            return "".join(pieces)
        escaped = yield from stream.peek()
        stream.position += len(escaped)
        pieces.append(escaped)


def _call_of(text: str) -> tuple[str, str] | None:
    """The name of a call, and its arguments as JSON."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escape sequences
            call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {_key(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _key(name: str | None) -> str:
    if name is None:
        raise ValueError("** is not a keyword argument")
    return name


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_text(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a value")


def _text(key: ast.expr | None) -> str:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        return key.value
    raise ValueError("not a key of a JSON object")


PYTHONIC = ToolFormat(
    "pythonic",
    parse,
    template_markers=("[func_name1(",),
    call_begins=(START,),
    markers=(START, END),
    loose_call=("[", ")]"),
)
LFM2 = ToolFormat(
    "lfm2",
    PythonBetween("<|tool_call_start|>", "<|tool_call_end|>").parse,
    template_markers=("<|tool_call_start|>", "<|tool_list_start|>", '"List of tools: ["'),
    call_begins=("<|tool_call_start|>",),
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    loose_call=("<|tool_call_start|>", "<|tool_call_end|>"),
)
OLMO3 = ToolFormat(
    "olmo3",
    PythonBetween("<function_calls>", "</function_calls>").parse,
    template_markers=("<function_calls>",),
    call_begins=("<function_calls>",),
    markers=("<function_calls>", "</function_calls>"),
    loose_call=("<function_calls>", "</function_calls>"),
)
