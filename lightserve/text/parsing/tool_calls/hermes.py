"""Hermes, Qwen and many others: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Small models, such as Qwen2.5-Coder, write the call in a JSON code block instead. There, only known tools count.
"""

from __future__ import annotations

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTemplate, ToolFormat, enclosed_calls

BEGIN, END = "<tool_call>", "</tool_call>"
BLOCK, BLOCK_END = "```json", "```"


def parse(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    while begin := (yield from stream.emit_until((BEGIN, BLOCK), writer.add_content)):
        is_block = begin == BLOCK
        yield from enclosed_calls(stream, writer, begin, BLOCK_END if is_block else END, known_tools_only=is_block)


HERMES = ToolFormat(
    "hermes",
    parse,
    template_markers=(BEGIN,),
    call_begins=(BEGIN,),
    markers=(BEGIN, END),
    call_template=CallTemplate(f'{BEGIN}\n{{"name": "{{name}}", "arguments": {{arguments}}}}\n{END}', between="\n"),
)
