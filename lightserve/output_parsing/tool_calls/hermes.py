"""Hermes, Qwen and many others: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Small ones, Qwen2.5-Coder among them, put the call into a block of JSON instead: there a tool that is known counts.
"""

from __future__ import annotations

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording, enclosed_calls

BEGIN, END = "<tool_call>", "</tool_call>"
BLOCK, BLOCK_END = "```json", "```"


def parse(tape: Tape, scribe: Scribe) -> Steps[None]:
    while begin := (yield from tape.pass_until((BEGIN, BLOCK), scribe.content)):
        is_block = begin == BLOCK
        yield from enclosed_calls(tape, scribe, begin, BLOCK_END if is_block else END, must_know=is_block)


HERMES = ToolFormat(
    "hermes",
    parse,
    signs=(BEGIN,),
    markers=(BEGIN, END),
    wording=Wording(f'{BEGIN}\n{{"name": "{{name}}", "arguments": {{arguments}}}}\n{END}', between="\n"),
)
