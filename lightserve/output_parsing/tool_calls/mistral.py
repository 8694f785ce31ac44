"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or since 2025 ``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

from lightserve.output_parsing.scribe import Scribe, short_call_id
from lightserve.output_parsing.tape import Steps, Tape
from lightserve.output_parsing.tool_calls.base import ToolFormat, Wording, json_calls, named_call

TAG, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse(tape: Tape, scribe: Scribe) -> Steps[None]:
    while (yield from tape.pass_until((TAG,), scribe.content)):
        tape.mark(len(TAG))
        yield from tape.skip_space()
        is_json = (yield from tape.peek()) in ("[", "{")
        if not (yield from json_calls(tape, scribe, (TAG,)) if is_json else _newer_call(tape, scribe)):
            scribe.content(tape.unmark())


def _newer_call(tape: Tape, scribe: Scribe) -> Steps[bool]:
    name, marker = yield from tape.read_until((ID, ARGUMENTS, TAG))
    given_id = ""
    if marker == ID:
        given_id, marker = yield from tape.read_until((ARGUMENTS, TAG))
    if marker != ARGUMENTS:
        tape.at -= len(marker)
        return False
    return (yield from named_call(tape, scribe, name.strip(), (TAG,), given_id.strip()))


MISTRAL = ToolFormat(
    "mistral",
    parse,
    signs=(TAG,),
    markers=(TAG, ID, ARGUMENTS),
    wording=Wording('{"name": "{name}", "arguments": {arguments}}', begin=f"{TAG}[", between=", ", end="]"),
    new_id=short_call_id,
)
MISTRAL_NEWER = ToolFormat(
    "mistral_newer",
    parse,
    signs=(ARGUMENTS,),
    markers=MISTRAL.markers,
    wording=Wording(f"{TAG}{{name}}{ARGUMENTS}{{arguments}}"),
    new_id=short_call_id,
)
