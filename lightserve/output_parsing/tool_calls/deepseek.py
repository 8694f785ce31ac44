"""DeepSeek V3 and R1: the kind of the tool, its name, its arguments in a fence. V3.1: the name, the arguments."""

# ruff: noqa: RUF001  (the bars are the model's)

from __future__ import annotations

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording, named_call
from lightserve.output_parsing.tool_calls.section import Section

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def _read_call(tape: Tape, scribe: Scribe) -> Steps[bool]:
    name, marker = yield from tape.read_until((SEPARATOR, CALL_END))
    if marker != SEPARATOR:
        return False
    if name.strip() == "function" and (yield from tape.peek()) != "{":
        name, _ = yield from tape.read_until(("\n", CALL_END))
        yield from tape.accept_next(f"{FENCE}json")
    if not (yield from named_call(tape, scribe, name.strip(), (CALL_END,))):
        return False
    yield from tape.accept_next(FENCE)
    yield from tape.accept_next(CALL_END)
    return True


_MARKERS = (BEGIN, END, CALL, SEPARATOR, CALL_END)
_SECTION = Section(BEGIN, END, CALL, _read_call)

DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    _SECTION.parse,
    signs=(BEGIN,),
    markers=_MARKERS,
    wording=Wording(f"{CALL}{{name}}{SEPARATOR}{{arguments}}{CALL_END}", begin=BEGIN, end=END),
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    _SECTION.parse,
    signs=(f"tool['type'] + '{SEPARATOR}'", f"tool['type']+'{SEPARATOR}'"),
    markers=_MARKERS,
    wording=Wording(
        f"{CALL}function{SEPARATOR}{{name}}\n{FENCE}json\n{{arguments}}\n{FENCE}{CALL_END}", BEGIN, "\n", END
    ),
)
