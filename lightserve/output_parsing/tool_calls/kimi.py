"""Kimi K2: ``functions.name:0`` as the id of a call, which its template wants back, and the arguments."""

from __future__ import annotations

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording, named_call
from lightserve.output_parsing.tool_calls.section import Section

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _read_call(tape: Tape, scribe: Scribe) -> Steps[bool]:
    head, marker = yield from tape.read_until((ARGUMENTS, CALL_END))
    given_id = head.strip()
    name = given_id.removeprefix("functions.").rpartition(":")[0] or given_id
    if marker != ARGUMENTS or not (yield from named_call(tape, scribe, name, (CALL_END,), given_id)):
        return False
    yield from tape.accept_next(CALL_END)
    return True


KIMI_K2 = ToolFormat(
    "kimi_k2",
    Section(BEGIN, END, CALL, _read_call).parse,
    signs=(BEGIN,),
    markers=(BEGIN, END, CALL, ARGUMENTS, CALL_END),
    wording=Wording(f"{CALL}functions.{{name}}:{{number}}{ARGUMENTS}{{arguments}}{CALL_END}", begin=BEGIN, end=END),
)
