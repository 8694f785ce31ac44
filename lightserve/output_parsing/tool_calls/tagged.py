"""Arguments as pairs of key and value tags: GLM 4.5 and later, Qwen3-Coder.

A value is text. It stays a string if the tool's schema says so; otherwise it is parsed as JSON if possible.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lightserve.output_parsing.delta_writer import DeltaWriter
from lightserve.output_parsing.json_text import parse_json
from lightserve.output_parsing.text_stream import Incremental, TextStream
from lightserve.output_parsing.tool_calls.base import ToolFormat, emit_raw, is_name

BEGIN, END = "<tool_call>", "</tool_call>"
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    before_name: str
    after_name: str  # "": a line break or the next tag ends the name
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    after_call: str = ""  # before END

    def parse(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        while (yield from stream.emit_until((BEGIN,), writer.add_content)):
            stream.mark(len(BEGIN))
            name = yield from self._read_name(stream)
            if not is_name(name):
                writer.add_content(stream.take_marked())
                continue
            stream.take_marked()
            writer.start_call(name)
            yield from self._emit_arguments(stream, writer, name)
            yield from stream.accept_after_space(self.after_call)
            yield from stream.accept_after_space(END)

    def _read_name(self, stream: TextStream) -> Incremental[str]:
        if not (yield from stream.accept_after_space(self.before_name)):
            return ""
        ends = (self.after_name,) if self.after_name else ("\n", self.before_key, END)
        name, end = yield from stream.read_until(ends)
        if end in (self.before_key, END):
            stream.position -= len(end)
        return name.strip() if end else ""

    def _emit_arguments(self, stream: TextStream, writer: DeltaWriter, name: str) -> Incremental[None]:
        opening = "{"
        while True:
            yield from stream.skip_space()
            stream.mark()
            if not (yield from stream.accept(self.before_key)):
                break
            pair = yield from self._read_pair(stream, writer, name)
            if pair is None:
                writer.add_arguments(opening + stream.take_marked())
                yield from emit_raw(stream, writer, (END,))
                return
            writer.add_arguments(opening + pair)
            opening = ", "
        stream.rewind()
        stream.take_marked()
        writer.add_arguments("{}" if opening == "{" else "}")

    def _read_pair(self, stream: TextStream, writer: DeltaWriter, name: str) -> Incremental[str | None]:
        """Key and value as a member of a JSON object; None if the pair is incomplete."""
        key, end = yield from stream.read_until((self.after_key,))
        if not end or (self.before_value and not (yield from stream.accept_after_space(self.before_value))):
            return None
        text, end = yield from stream.read_until((self.after_value,))
        if not end:
            return None
        if not self.before_value:  # then the value is on separate lines
            text = text.removeprefix("\n").removesuffix("\n")
        key = key.strip()
        value = _value(text, _type_of(writer.tools.get(name), key))
        return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    stripped = text.strip()
    json_text = _PYTHON.get(stripped, stripped)
    value = parse_json(json_text)
    return text if value is None and json_text != "null" else value


def _type_of(schema: Any, key: str) -> Any:
    """The client wrote the schema: any part may have any type."""
    for part in ("properties", key, "type"):
        schema = schema.get(part) if isinstance(schema, dict) else None
    return schema


GLM45 = ToolFormat(
    "glm45",
    Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>").parse,
    template_markers=("<arg_key>",),
    markers=(BEGIN, END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>").parse,
    template_markers=("<function=",),
    markers=(BEGIN, END),
)
