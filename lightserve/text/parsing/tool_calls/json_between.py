"""JSON calls between two markers: the formats that differ from Hermes in the markers and in the list only."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTemplate, ToolFormat, enclosed_calls, json_calls

_CALL = '{"name": "{name}", "arguments": {arguments}}'


@dataclass(frozen=True, slots=True)
class JsonBetween:
    begins: tuple[str, ...]
    end: str  # "": the calls end with their JSON
    plain_begins: tuple[str, ...] = ()  # may occur in other text: only known tools count
    may_be_whole_output: bool = False

    def parse(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        if self.may_be_whole_output:
            stream.mark()
            if not (yield from json_calls(stream, writer, known_tools_only=True)):
                stream.rewind()
                stream.take_marked()
        while begin := (yield from stream.emit_until((*self.begins, *self.plain_begins), writer.add_content)):
            yield from enclosed_calls(stream, writer, begin, self.end, begin in self.plain_begins)


GRANITE = ToolFormat(
    "granite",
    JsonBetween(("<|tool_call|>", "<tool_call>"), "</tool_call>").parse,
    template_markers=("<|tool_call|>",),
    call_begins=("<|tool_call|>", "<tool_call>"),
    markers=("<|tool_call|>", "<tool_call>", "</tool_call>"),
    call_template=CallTemplate(_CALL, begin="<|tool_call|>[", between=", ", end="]"),
)
GRANITE_20B = ToolFormat(
    "granite-20b-fc",
    JsonBetween(("<function_call>",), "").parse,
    template_markers=("<function_call> ",),
    call_begins=("<function_call>",),
    markers=("<function_call>",),
    call_template=CallTemplate(f"<function_call> {_CALL}", between="\n"),
)
HUNYUAN_A13B = ToolFormat(
    "hunyuan_a13b",
    JsonBetween(("<tool_calls>",), "</tool_calls>").parse,
    template_markers=("<tool_calls>[", "<tool_calls>\\n[", "<tool_calls></tool_calls>"),
    call_begins=("<tool_calls>",),
    markers=("<tool_calls>", "</tool_calls>"),
    call_template=CallTemplate(_CALL, begin="<tool_calls>[", between=", ", end="]</tool_calls>"),
)
GIGACHAT3 = ToolFormat(
    "gigachat3",
    JsonBetween(("<|function_call|>", "function call<|role_sep|>"), "").parse,
    template_markers=("<|function_call|>", "'role': 'function call'"),
    call_begins=("<|function_call|>", "function call<|role_sep|>"),
    markers=("<|function_call|>", "<|role_sep|>"),
    call_template=CallTemplate(f"<|function_call|>{_CALL}", between="\n"),
)
NEMOTRON = ToolFormat(
    "nemotron",
    JsonBetween(("<TOOLCALL>",), "</TOOLCALL>").parse,
    template_markers=("<TOOLCALL>",),
    call_begins=("<TOOLCALL>",),
    markers=("<TOOLCALL>", "</TOOLCALL>"),
    call_template=CallTemplate(_CALL, begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>"),
)
INTERNLM = ToolFormat(
    "internlm",
    JsonBetween(("<|action_start|><|plugin|>",), "<|action_end|>").parse,
    template_markers=("<|action_start|><|plugin|>",),
    call_begins=("<|action_start|><|plugin|>",),
    markers=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    call_template=CallTemplate(
        '<|action_start|><|plugin|>\n{"name": "{name}", "parameters": {arguments}}<|action_end|>', between="\n"
    ),
)
LONGCAT = ToolFormat(
    "longcat",
    JsonBetween(("<longcat_tool_call>",), "</longcat_tool_call>").parse,
    template_markers=("<longcat_tool_call>",),
    call_begins=("<longcat_tool_call>",),
    markers=("<longcat_tool_call>", "</longcat_tool_call>"),
    call_template=CallTemplate(f"<longcat_tool_call>\n{_CALL}\n</longcat_tool_call>", between="\n"),
)
PHI4_MINI = ToolFormat(
    "phi4_mini_json",
    JsonBetween(("<|tool_call|>",), "<|/tool_call|>", plain_begins=("functools",)).parse,
    template_markers=("functools[", "'<|tool|>' + message['tools'] + '<|/tool|>'"),
    call_begins=("<|tool_call|>", "functools"),
    markers=("<|tool_call|>", "<|/tool_call|>"),
    call_template=CallTemplate(_CALL, begin="functools[", between=", ", end="]"),
)
XLAM = ToolFormat(
    "xlam",
    JsonBetween(("<tool_call>", "[TOOL_CALLS]"), "</tool_call>", ("```json",), may_be_whole_output=True).parse,
    template_markers=('[{"name": "tool_call_name", "arguments"',),
    call_begins=("<tool_call>", "[TOOL_CALLS]"),
    markers=("<tool_call>", "</tool_call>", "[TOOL_CALLS]"),
    call_template=CallTemplate(_CALL, begin="[", between=", ", end="]"),
)
