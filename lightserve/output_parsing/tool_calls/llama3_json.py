"""Llama 3 and 4: ``{"name": ..., "parameters": {...}}``, after a tag or as the whole answer."""

from __future__ import annotations

from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording, enclosed_calls, json_calls

TAGS = ("<|python_tag|>", "<|python_start|>")  # of 3 and of 4
END = "<|python_end|>"


def parse(tape: Tape, scribe: Scribe) -> Steps[None]:
    tape.mark()
    if not (yield from json_calls(tape, scribe, must_know=True)):  # an answer in JSON need not be a call
        scribe.content(tape.unmark())
    while tag := (yield from tape.pass_until(TAGS, scribe.content)):
        yield from enclosed_calls(tape, scribe, tag, END)


LLAMA3_JSON = ToolFormat(
    "llama3_json",
    parse,
    signs=(*TAGS, '{"name": function name, "parameters": dictionary'),
    markers=(*TAGS, END),
    wording=Wording('{"name": "{name}", "parameters": {arguments}}', between="; "),
)
