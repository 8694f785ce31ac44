"""The description of a tool-call format, and the parsing functions that several formats share.

A malformed call is content, as long as its name has not been emitted; it is dropped if the output was cut off there.
After that it cannot be withdrawn: the malformed arguments are emitted unchanged, up to the end of the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightserve.text.parsing.delta_writer import DeltaWriter, NewId, call_id
from lightserve.text.parsing.json_text import emit_json, parse_json, read_string
from lightserve.text.parsing.text_stream import Incremental, TextStream

CALL_MEMBERS = ("name", "arguments", "parameters", "type", "id", "function")
_NAME = re.compile(r"[\w.:/-]{1,256}")

Parse = Callable[[TextStream, DeltaWriter], Incremental[None]]  # reads the stream to its end


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """The literal text of a format, for a grammar that forces calls; placeholders: {name}, {arguments}, {number}."""

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags of a format that writes every argument as text between tags."""

    begin: str
    end: str
    before_name: str
    after_name: str  # "": a line break or the next tag ends the name
    before_key: str
    after_key: str
    before_value: str  # "": the value follows the key; line breaks around it do not belong to it
    after_value: str
    after_call: str = ""  # if given, several calls may come between begin and end, or one without them


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    parse: Parse
    template_markers: tuple[str, ...]  # a chat template with any of these uses this format
    call_begins: tuple[str, ...] = ()  # the markers that begin a call or a section of calls
    markers: tuple[str, ...] = ()  # may be special tokens of the model; the parser must see them nevertheless
    call_template: CallTemplate | None = None  # None if the arguments are not JSON
    loose_call: tuple[str, str] = ("", "")  # then: what a call begins and ends with
    tags: CallTags | None = None  # then: if each argument is between tags, and a grammar can express it
    new_id: NewId = call_id


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def add_no_call(stream: TextStream, writer: DeltaWriter) -> None:
    """What was read since the mark began as a call and is none: it is content.

    If the output was cut off in it, it is dropped: clients cannot use half of a call that has no name.
    """
    text = stream.take_marked()
    if stream.is_cut_off:
        writer.drop_call()
    else:
        writer.add_content(text)


def emit_raw(stream: TextStream, writer: DeltaWriter, ends: Sequence[str]) -> Incremental[None]:
    """Emit malformed arguments unchanged, up to one of ``ends``, which stays unread."""
    end = yield from stream.emit_until(ends, writer.add_arguments)
    stream.position -= len(end)


def named_call(
    stream: TextStream, writer: DeltaWriter, name: str, ends: Sequence[str], model_id: str | None = None
) -> Incremental[bool]:
    """Emit a call whose arguments come next as a JSON object. False if none comes; the mark then stays."""
    yield from stream.skip_space()
    if not is_name(name) or (yield from stream.peek()) != "{":
        return False
    stream.take_marked()
    writer.start_call(name, model_id)
    yield from _emit_arguments(stream, writer, ends)
    return True


def _emit_arguments(stream: TextStream, writer: DeltaWriter, ends: Sequence[str]) -> Incremental[bool]:
    """Emit the arguments as a JSON object; False if it is malformed or ends too early."""
    is_closed = yield from emit_json(stream, writer.add_arguments)
    if not is_closed:
        yield from emit_raw(stream, writer, ends)
    if is_closed or not stream.is_at_end:
        writer.end_call()
    return is_closed


def json_calls(
    stream: TextStream, writer: DeltaWriter, ends: Sequence[str] = (), known_tools_only: bool = False
) -> Incremental[bool]:
    """Emit one or more calls as JSON objects, in a list or in sequence.

    ``known_tools_only``: other names are not calls. False if the first object is not a call; the mark then stays.
    """
    yield from stream.skip_space()
    is_list = yield from stream.accept("[")
    if not (yield from _json_call(stream, writer, ends, known_tools_only)):
        return False
    while True:
        stream.mark()
        if not (yield from _is_another_next(stream)):
            stream.unread()
            break
        if not (yield from _json_call(stream, writer, ends, known_tools_only)):
            break
    add_no_call(stream, writer)
    if is_list:
        yield from stream.accept_end("]")
    return True


def enclosed_calls(
    stream: TextStream, writer: DeltaWriter, begin: str, end: str, known_tools_only: bool = False
) -> Incremental[None]:
    """Emit ``json_calls`` between ``begin``, which was read last, and ``end``; anything else is content."""
    stream.mark(len(begin))
    if (yield from json_calls(stream, writer, (end or begin,), known_tools_only)):
        yield from stream.accept_end(end)
    elif known_tools_only:  # other text may begin like this
        writer.add_content(stream.take_marked())
    else:
        add_no_call(stream, writer)


def _is_another_next(stream: TextStream) -> Incremental[bool]:
    yield from stream.skip_space()
    if not (yield from stream.accept(",")):
        yield from stream.accept(";")
    yield from stream.skip_space()
    return (yield from stream.peek()) == "{"


def _json_call(
    stream: TextStream, writer: DeltaWriter, ends: Sequence[str], known_tools_only: bool
) -> Incremental[bool]:
    """Emit an object with a name and arguments. Arguments that follow the name are emitted while they arrive."""
    begin = stream.marked_length
    name = yield from _head(stream)
    if name is not None and _is_allowed(name, writer, known_tools_only):
        stream.take_marked()
        writer.start_call(name)
        if not (yield from _emit_arguments(stream, writer, ends)):
            return True
        if not (yield from stream.accept_after_space("}")) and (yield from stream.accept(",")):
            yield from emit_json(stream, _drop, open_with="{")
        return True
    stream.rewind(begin)
    if known_tools_only and not (yield from _may_be_call(stream)):
        return False
    stream.rewind(begin)
    pieces: list[str] = []
    if not (yield from emit_json(stream, pieces.append)):
        return False
    call = _call_of(parse_json("".join(pieces)))
    if call is None or not _is_allowed(call[0], writer, known_tools_only):
        return False
    stream.take_marked()
    writer.add_call(*call)
    return True


def _may_be_call(stream: TextStream) -> Incremental[bool]:
    """Whether the first member of the object that comes next belongs to a call; an answer in JSON is not held back."""
    if not (yield from stream.accept_after_space("{")):
        return False
    yield from stream.skip_space()
    return (yield from read_string(stream)) in CALL_MEMBERS


def _is_allowed(name: str, writer: DeltaWriter, known_tools_only: bool) -> bool:
    return name in writer.tools if known_tools_only else bool(name)


def _drop(text: str) -> None:
    """Ignores unknown members of a call."""


def _head(stream: TextStream) -> Incremental[str | None]:
    """The name in ``{"name": ..., "arguments": {``, read up to the last brace; None for any other text."""
    for literal in ("{", '"name"', ":"):
        if not (yield from stream.accept_after_space(literal)):
            return None
    yield from stream.skip_space()
    name = yield from read_string(stream)
    if not name or not (yield from stream.accept_after_space(",")):
        return None
    if not (yield from stream.accept_after_space('"arguments"')) and not (yield from stream.accept('"parameters"')):
        return None
    if not (yield from stream.accept_after_space(":")):
        return None
    yield from stream.skip_space()
    return name if (yield from stream.peek()) == "{" else None


def _call_of(value: Any) -> tuple[str, Any] | None:
    """Name and arguments, in any order. The arguments may be JSON in a string, or missing."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # OpenAI's shape of a call
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, dict) or (isinstance(arguments, str) and isinstance(parse_json(arguments), dict)):
        return value["name"], arguments
    return None
