"""Harmony, the format of gpt-oss: messages in channels.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

Reasoning, content and calls are messages of one kind, so one parser reads all of them. The prompt ends with
``<|start|>assistant``.
"""

from __future__ import annotations

import re

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import CallTemplate, ToolFormat, add_no_call, named_call

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([\w.:/-]+)")


def parse(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    stream.mark()
    is_header = yield from stream.accept_after_space("to=")  # the prompt has the start of the header
    if not is_header:
        stream.rewind()
        stream.take_marked()
    while True:
        if not is_header:
            marker = yield from stream.emit_until((CHANNEL, START, *ENDS), writer.add_content)
            if not marker:
                return
            if marker in ENDS:
                continue
            stream.mark(len(marker))
        is_header = False
        _, marker = yield from stream.read_until((MESSAGE, *ENDS))
        if marker == MESSAGE:
            yield from _parse_message(stream, writer)
        else:
            add_no_call(stream, writer)


def _parse_message(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    """Parse the body of a message, after its header, which is marked."""
    header = stream.take_marked()
    function = _FUNCTION.search(header)
    channel = _CHANNEL.search(header)
    if function is not None and writer.tools:
        stream.mark()
        if not (yield from named_call(stream, writer, function[1], ENDS)):
            add_no_call(stream, writer)
    elif channel is not None and channel[1] == "analysis":
        writer.is_reasoning = True
        yield from _emit_body(stream, writer)
        writer.end_reasoning()
    else:
        yield from _emit_body(stream, writer)


def _emit_body(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    emit = writer.add_reasoning if writer.is_reasoning else writer.add_content
    end = yield from stream.emit_until((*ENDS, START), emit)
    if end == START:  # the model forgot the end: the next message starts here
        stream.position -= len(START)


HARMONY = ToolFormat(
    "openai",
    parse,
    template_markers=("<|channel|>commentary", "<|channel|>analysis"),
    markers=MARKERS,
    call_template=CallTemplate(
        f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}{{arguments}}{CALL}",
        between=f"{START}assistant",
    ),
)
