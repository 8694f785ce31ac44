"""Hermes, Qwen and many others: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording, json_calls

BEGIN, END = "<tool_call>", "</tool_call>"


def parse(tape: Tape, scribe: Scribe) -> Steps[None]:
    while (yield from tape.pass_until((BEGIN,), scribe.content)):
        tape.mark(len(BEGIN))
        if (yield from json_calls(tape, scribe, (END,))):
            yield from tape.accept_next(END)
        else:
            scribe.content(tape.unmark())


HERMES = ToolFormat(
    "hermes",
    parse,
    signs=(BEGIN,),
    markers=(BEGIN, END),
    wording=Wording(f'{BEGIN}\n{{"name": "{{name}}", "arguments": {{arguments}}}}\n{END}', between="\n"),
)
