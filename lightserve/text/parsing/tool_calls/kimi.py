"""Kimi K2: the call id ``functions.name:0``, which its chat template expects back, and the arguments."""

from __future__ import annotations

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTemplate, ToolFormat, named_call
from lightserve.text.parsing.tool_calls.section import Section

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _read_call(stream: TextStream, writer: DeltaWriter) -> Incremental[bool]:
    head, marker = yield from stream.read_until((ARGUMENTS, CALL_END))
    model_id = head.strip()
    name = model_id.removeprefix("functions.").rpartition(":")[0] or model_id
    if marker != ARGUMENTS or not (yield from named_call(stream, writer, name, (CALL_END,), model_id)):
        return False
    yield from stream.accept_end(CALL_END)
    return True


KIMI_K2 = ToolFormat(
    "kimi_k2",
    Section(BEGIN, END, CALL, _read_call).parse,
    template_markers=(BEGIN,),
    call_begins=(BEGIN, CALL),
    markers=(BEGIN, END, CALL, ARGUMENTS, CALL_END),
    call_template=CallTemplate(
        f"{CALL}functions.{{name}}:{{number}}{ARGUMENTS}{{arguments}}{CALL_END}", begin=BEGIN, end=END
    ),
)
