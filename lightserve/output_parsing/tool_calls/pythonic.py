"""Llama 3.2 and 4: the whole answer is a list of Python calls, ``[f(a=1), g()]``. It is parsed, never run."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat

START, END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 64  # of brackets: Python's own parser and what follows it recurse
CLOSERS = {"(": ")", "[": "]", "{": "}"}
WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in
_PLAIN = re.compile(r"[^()\[\]{}'\"]*")
_QUOTED = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}


def parse(tape: Tape, scribe: Scribe) -> Steps[None]:
    tape.mark()
    yield from tape.skip_space()
    yield from tape.accept(START)
    if (yield from tape.accept_next("[")):
        yield from _parse_calls(tape, scribe)
    scribe.content(tape.unmark())
    yield from tape.pass_until((), scribe.content)


def _parse_calls(tape: Tape, scribe: Scribe) -> Steps[None]:
    """What is marked at the end is content."""
    while (yield from _parse_call(tape, scribe)):
        tape.mark()
        if (yield from tape.accept_next("]")):
            tape.unmark()
            yield from tape.accept_next(END)
            return
        if not (yield from tape.accept(",")):
            return


def _parse_call(tape: Tape, scribe: Scribe) -> Steps[bool]:
    yield from tape.skip_space()
    text = yield from _read_call(tape)
    call = _call_of(text) if text else None
    if call is None or call[0] not in scribe.tools:  # a list in brackets need not be one of calls
        return False
    tape.unmark()
    scribe.call(*call)
    return True


def _read_call(tape: Tape) -> Steps[str]:
    """The text up to the bracket that closes the first one; "" where none does."""
    pieces: list[str] = []
    closers: list[str] = []
    while True:
        yield from tape.pass_run(_PLAIN, pieces.append)
        char = yield from tape.peek()
        tape.at += len(char)
        pieces.append(char)
        if char in CLOSERS:
            closers.append(CLOSERS[char])
        elif char in _QUOTED:
            pieces.append((yield from _read_quoted(tape, char)))
        elif closers and char == closers[-1]:
            closers.pop()
        else:
            return ""
        if not closers or len(closers) > MAX_DEPTH:
            return "" if closers else "".join(pieces)


def _read_quoted(tape: Tape, quote: str) -> Steps[str]:
    """The rest of a string; what follows a backslash does not end it."""
    pieces: list[str] = []
    while True:
        yield from tape.pass_run(_QUOTED[quote], pieces.append)
        char = yield from tape.peek()
        tape.at += len(char)
        pieces.append(char)
        if char != "\\":
            return "".join(pieces)
        escaped = yield from tape.peek()
        tape.at += len(escaped)
        pieces.append(escaped)


def _call_of(text: str) -> tuple[str, str] | None:
    """The name of a call, and its arguments as JSON."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {_key(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _key(name: str | None) -> str:
    if name is None:
        raise ValueError("** is no argument by name")
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
    signs=("[func_name1(",),
    markers=(START, END),
)
