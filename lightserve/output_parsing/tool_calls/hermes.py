"""Hermes, Qwen and many others: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Small ones, Qwen2.5-Coder among them, put the call into a block of JSON instead: there a tool that is known counts.
"""

from __future__ import annotations

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording, json_calls

BEGIN, END = "<tool_call>", "</tool_call>"
BLOCK, BLOCK_END = "```json", "```"


def parse(tape: Tape, scribe: Scribe) -> Steps[None]:
    while begin := (yield from tape.pass_until((BEGIN, BLOCK), scribe.content)):
        is_block = begin == BLOCK
        end = BLOCK_END if is_block else END
        tape.mark(len(begin))
        if (yield from json_calls(tape, scribe, (end,), must_know=is_block)):
            yield from tape.accept_next(end)
        else:
            scribe.content(tape.unmark())


HERMES = ToolFormat(
    "hermes",
    parse,
    signs=(BEGIN,),
    markers=(BEGIN, END),
    wording=Wording(f'{BEGIN}\n{{"name": "{{name}}", "arguments": {{arguments}}}}\n{END}', between="\n"),
)
