"""Arguments between tags, each value as text: GLM 4.5 and later, Qwen3-Coder, Seed-OSS, MiniMax M2 and others.

A value stays a string if the tool's schema allows one, and is emitted while it arrives. Null, objects and arrays are
exceptions, where the schema allows these too. Values of other types, or of no known type, are parsed as JSON if
possible.
"""

# ruff: noqa: RUF001  (DeepSeek uses these bars)

from __future__ import annotations

import json
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from lightserve.text.json_schema.tool_schema import ANY, ToolSchema, Types
from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.json_text import parse_json
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTags, ToolFormat, add_no_call, emit_raw, is_name

MAX_HEAD = 16  # characters of a value, after which it is no longer null, nor an object after white space
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags(CallTags):
    def parse(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        begins = (self.begin, self.before_name) if self.after_call else (self.begin,)
        while begin := (yield from stream.emit_until(begins, writer.add_content)):
            stream.mark(len(begin))
            is_bare = begin != self.begin  # models omit the begin; but text may mention the tag: only tools count
            is_named = is_bare or (yield from stream.accept_after_space(self.before_name))
            if not is_named or not (yield from self._parse_call(stream, writer, known_tools_only=is_bare)):
                if is_bare:
                    writer.add_content(stream.take_marked())
                else:
                    add_no_call(stream, writer)
                continue
            while self.after_call and (yield from self._is_another_next(stream)):
                if not (yield from self._parse_call(stream, writer)):
                    add_no_call(stream, writer)
                    break
            yield from stream.accept_end(self.end)

    def _is_another_next(self, stream: TextStream) -> Incremental[bool]:
        yield from stream.skip_space()
        stream.mark()
        if (yield from stream.accept(self.before_name)):
            return True
        stream.unread()
        return False

    def _parse_call(self, stream: TextStream, writer: DeltaWriter, known_tools_only: bool = False) -> Incremental[bool]:
        """Parse a call from its name on. Return False, and keep the mark, if there is no name."""
        name = yield from self._read_name(stream)
        if not is_name(name) or (known_tools_only and name not in writer.tools):
            return False
        stream.take_marked()
        writer.start_call(name)
        yield from self._emit_arguments(stream, writer, writer.tools.get(name))
        yield from stream.accept_end(self.after_call)
        return True

    def _read_name(self, stream: TextStream) -> Incremental[str]:
        ends = (self.after_name,) if self.after_name else ("\n", self.before_key, self.end)
        name, end = yield from stream.read_until(ends)
        if end in (self.before_key, self.end):
            stream.position -= len(end)
        return name.strip() if end else ""

    def _emit_arguments(self, stream: TextStream, writer: DeltaWriter, schema: ToolSchema | None) -> Incremental[None]:
        opening = "{"
        while True:
            yield from stream.skip_space()
            stream.mark()
            if not (yield from stream.accept(self.before_key)):
                break
            key, end = yield from stream.read_until((self.after_key,))
            if not end or (self.before_value and not (yield from stream.accept_after_space(self.before_value))):
                writer.add_arguments(opening + stream.take_marked())
                yield from emit_raw(stream, writer, (self.end,))
                return
            stream.take_marked()
            key, types = self._key_and_types(key, schema)
            writer.add_arguments(f"{opening}{encode_basestring(key)}: ")
            if not (yield from self._emit_value(stream, writer, types)):
                return
            opening = ", "
        stream.unread()
        writer.add_arguments("{}" if opening == "{" else "}")
        if not stream.is_at_end:
            writer.end_call()

    def _key_and_types(self, text: str, schema: ToolSchema | None) -> tuple[str, Types]:
        key, _, attributes = text.partition('"') if self.after_key.startswith('"') else (text, "", "")
        key = key.strip()
        types = ANY if schema is None else schema.types(key)
        if attributes.endswith('string="true'):  # DeepSeek V3.2 says what a value is
            return key, frozenset({"string"})
        return key, types - {"string"} if attributes else types

    def _emit_value(self, stream: TextStream, writer: DeltaWriter, types: Types) -> Incremental[bool]:
        """Emit a value as JSON: a string while it arrives, any other at its end. Return whether it ended."""
        ends: tuple[str, ...] = (self.after_value,)
        if not self.before_value:
            yield from stream.accept("\n")
            ends = (f"\n{self.after_value}", self.after_value)
        head, end = yield from _read_head(stream, ends, types)
        if end:
            writer.add_arguments(json.dumps(_value(head, types), ensure_ascii=False))
            return True
        if _may_be_no_string(head, types):  # the output ended
            writer.add_arguments(head)
            return False
        writer.add_arguments(encode_basestring(head)[:-1])
        end = yield from stream.emit_until(ends, lambda text: writer.add_arguments(encode_basestring(text)[1:-1]))
        writer.add_arguments('"' if end else "")
        return bool(end)


def _read_head(stream: TextStream, ends: tuple[str, ...], types: Types) -> Incremental[tuple[str, str]]:
    """The start of a value, up to where it is certain to be a string; or the whole value, and its end."""
    head = ""
    while _may_be_no_string(head, types):
        piece, end = yield from stream.read_piece(ends)
        head += piece
        if end or not piece:
            return head, end
    return head, ""


def _may_be_no_string(head: str, types: Types) -> bool:
    """Whether a value of these types that starts like this may be anything but a string."""
    if "string" not in types or len(types) == 1:
        return "string" not in types
    start = head[:MAX_HEAD].strip()
    if not start:
        return len(head) < MAX_HEAD
    if start[0] in "{[":
        return not types.isdisjoint(("object", "array"))
    return "null" in types and len(head) <= MAX_HEAD and ("null".startswith(start) or "None".startswith(start))


def _value(text: str, types: Types) -> Any:
    if not _may_be_no_string(text, types):
        return text
    stripped = text.strip()
    json_text = _PYTHON.get(stripped, stripped)
    value = parse_json(json_text)
    if (value is None and json_text != "null") or ("string" in types and _type_name(value) not in types):
        return text
    return value


def _type_name(value: Any) -> str:
    return {dict: "object", list: "array", type(None): "null"}.get(type(value), "")


def _tagged(name: str, tags: Tags, template_markers: tuple[str, ...], *markers: str) -> ToolFormat:
    begins = (tags.begin, tags.before_name) if tags.after_call else (tags.begin,)
    format_markers = (tags.begin, tags.end, *markers)
    # DeepSeek's keys have an attribute that depends on the value
    known = None if "DSML" in tags.before_key else tags
    return ToolFormat(
        name, tags.parse, template_markers, begins, format_markers, loose_call=(tags.begin, tags.end), tags=known
    )


_FUNCTION = ("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>")
_INVOKE = ('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>")
_DSML_INVOKE = (
    '<｜DSML｜invoke name="',
    '">',
    '<｜DSML｜parameter name="',
    '">',
    "",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
)

GLM45 = _tagged(
    "glm45",
    Tags("<tool_call>", "</tool_call>", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ("<arg_key>",),
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
QWEN3_CODER = _tagged("qwen3_coder", Tags("<tool_call>", "</tool_call>", *_FUNCTION), ("<parameter=",))
SEED_OSS = _tagged("seed_oss", Tags("<seed:tool_call>", "</seed:tool_call>", *_FUNCTION), ("<seed:tool_call>",))
MINIMAX_M2 = _tagged(
    "minimax_m2", Tags("<minimax:tool_call>", "</minimax:tool_call>", *_INVOKE), ("<minimax:tool_call>",)
)
DEEPSEEK_V32 = _tagged(
    "deepseek_v32",
    Tags("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", *_DSML_INVOKE),
    ("｜DSML｜function_calls", "{dsml_token}function_calls", "dsml_token + 'function_calls"),
)
DEEPSEEK_V4 = _tagged(
    "deepseek_v4",
    Tags("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", *_DSML_INVOKE),
    ("｜DSML｜tool_calls", "{dsml_token}tool_calls", "dsml_token + 'tool_calls"),
)
