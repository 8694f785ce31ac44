"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or since 2025 ``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

from lightserve.text.parsing.delta_writer import DeltaWriter, short_call_id
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTemplate, ToolFormat, add_no_call, json_calls, named_call

TAG, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def parse(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    while (yield from stream.emit_until((TAG,), writer.add_content)):
        stream.mark(len(TAG))
        yield from stream.skip_space()
        is_json = (yield from stream.peek()) in ("[", "{")
        if not (yield from json_calls(stream, writer, (TAG,)) if is_json else _newer_call(stream, writer)):
            add_no_call(stream, writer)


def _newer_call(stream: TextStream, writer: DeltaWriter) -> Incremental[bool]:
    name, marker = yield from stream.read_until((ID, ARGUMENTS, TAG))
    model_id = ""
    if marker == ID:
        model_id, marker = yield from stream.read_until((ARGUMENTS, TAG))
    if marker != ARGUMENTS:
        stream.position -= len(marker)
        return False
    return (yield from named_call(stream, writer, name.strip(), (TAG,), model_id.strip()))


MISTRAL = ToolFormat(
    "mistral",
    parse,
    template_markers=(TAG,),
    call_begins=(TAG,),
    markers=(TAG, ID, ARGUMENTS),
    call_template=CallTemplate('{"name": "{name}", "arguments": {arguments}}', begin=f"{TAG}[", between=", ", end="]"),
    new_id=short_call_id,
)
MISTRAL_NEWER = ToolFormat(
    "mistral_newer",
    parse,
    template_markers=(ARGUMENTS,),
    call_begins=(TAG,),
    markers=MISTRAL.markers,
    call_template=CallTemplate(f"{TAG}{{name}}{ARGUMENTS}{{arguments}}"),
    new_id=short_call_id,
)
