"""DeepSeek V3 and R1: type, name, and the arguments in a code fence. V3.1: name and arguments."""

# ruff: noqa: RUF001  (the model uses these bars)

from __future__ import annotations

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTemplate, ToolFormat, named_call
from lightserve.text.parsing.tool_calls.section import Section

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def _read_call(stream: TextStream, writer: DeltaWriter) -> Incremental[bool]:
    name, marker = yield from stream.read_until((SEPARATOR, CALL_END))
    if marker != SEPARATOR:
        return False
    if name.strip() == "function" and (yield from stream.peek()) != "{":
        name, _ = yield from stream.read_until(("\n", CALL_END))
        yield from stream.accept_after_space(f"{FENCE}json")
    if not (yield from named_call(stream, writer, name.strip(), (CALL_END,))):
        return False
    yield from stream.accept_end(FENCE)
    yield from stream.accept_end(CALL_END)
    return True


_MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)
_SECTION = Section(BEGIN, END, CALL, _read_call)

DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    _SECTION.parse,
    template_markers=(BEGIN,),
    call_begins=(BEGIN, CALL),
    markers=_MARKERS,
    call_template=CallTemplate(f"{CALL}{{name}}{SEPARATOR}{{arguments}}{CALL_END}", begin=BEGIN, end=END),
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    _SECTION.parse,
    template_markers=(f"['type'] + '{SEPARATOR}'", f"['type']+'{SEPARATOR}'", f"function{SEPARATOR}"),
    call_begins=(BEGIN, CALL),
    markers=_MARKERS,
    call_template=CallTemplate(
        f"{CALL}function{SEPARATOR}{{name}}\n{FENCE}json\n{{arguments}}\n{FENCE}{CALL_END}", BEGIN, "\n", END
    ),
)
