"""Llama 3 and 4: ``{"name": ..., "parameters": {...}}``, after a tag or as the whole output."""

from __future__ import annotations

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTemplate, ToolFormat, enclosed_calls, json_calls

TAGS = ("<|python_tag|>", "<|python_start|>")  # Llama 3, Llama 4
END = "<|python_end|>"


def parse(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    stream.mark()
    if not (yield from json_calls(stream, writer, known_tools_only=True)):  # a JSON answer is not always a call
        writer.add_content(stream.take_marked())
    while tag := (yield from stream.emit_until(TAGS, writer.add_content)):
        yield from enclosed_calls(stream, writer, tag, END)


LLAMA3_JSON = ToolFormat(
    "llama3_json",
    parse,
    template_markers=(*TAGS, '{"name": function name, "parameters": dictionary'),
    call_begins=TAGS,
    markers=(*TAGS, END),
    call_template=CallTemplate('{"name": "{name}", "parameters": {arguments}}', between="; "),
)
