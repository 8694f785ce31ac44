"""Gemma: ``call:name{city:<escape>Paris<escape>,days:2}`` between two markers. Only strings have delimiters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from json.encoder import encode_basestring

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.json_text import CLOSERS, parse_json
from lightserve.text.parsing.text_stream import Incremental, PlainText, TextStream
from lightserve.text.parsing.tool_calls.base import ToolFormat, add_no_call, emit_raw, is_name

_BARE = PlainText(re.compile(r"[^,}\]<]+"), frozenset(",}]<").isdisjoint)
_KEY = PlainText(re.compile(r"[^:,}\]{\[]+"), frozenset(":,}]{[").isdisjoint)


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    begin: str
    end: str
    quote: str

    def parse(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        while (yield from stream.emit_until((self.begin,), writer.add_content)):
            stream.mark(len(self.begin))
            yield from stream.accept_after_space("call:")
            name, brace = yield from stream.read_until(("{", self.end))
            if brace != "{" or not is_name(name.strip()):
                add_no_call(stream, writer)
                continue
            stream.take_marked()
            writer.start_call(name.strip())
            if (yield from self._emit_object(stream, writer)):
                writer.end_call()
            else:
                yield from emit_raw(stream, writer, (self.end,))
            yield from stream.accept_end(self.end)

    def _emit_object(self, stream: TextStream, writer: DeltaWriter) -> Incremental[bool]:
        """Emit an object, after its brace, as JSON while it arrives. Return whether it was closed."""
        emit = writer.add_arguments
        emit("{")
        closers = ["}"]
        while closers:
            yield from stream.skip_space()
            char = yield from stream.peek()
            if char in ("", ",", closers[-1]):
                stream.position += len(char)
                emit(", " if char == "," else char)
                if not char:
                    return False
                if char != ",":
                    closers.pop()
                continue
            if closers[-1] == "}" and not (yield from self._emit_key(stream, writer)):
                return False
            yield from stream.skip_space()
            char = yield from stream.peek()
            if char in CLOSERS:
                stream.position += 1
                emit(char)
                closers.append(CLOSERS[char])
            elif not (yield from self._emit_value(stream, writer)):
                return False
        return True

    def _emit_key(self, stream: TextStream, writer: DeltaWriter) -> Incremental[bool]:
        pieces: list[str] = []
        if (yield from stream.accept(self.quote)):
            yield from stream.emit_until((self.quote,), pieces.append)
        else:
            yield from stream.emit_run(_KEY, pieces.append)
        if not (yield from stream.accept_after_space(":")):
            writer.add_arguments("".join(pieces))
            return False
        writer.add_arguments(f"{encode_basestring(''.join(pieces).strip())}: ")
        return True

    def _emit_value(self, stream: TextStream, writer: DeltaWriter) -> Incremental[bool]:
        """Emit a string while it arrives, or a number or word. Return whether it ended."""
        if (yield from stream.accept(self.quote)):
            writer.add_arguments('"')
            end = yield from stream.emit_until(
                (self.quote,), lambda text: writer.add_arguments(encode_basestring(text)[1:-1])
            )
            writer.add_arguments('"' if end else "")
            return bool(end)
        pieces: list[str] = []
        yield from stream.emit_run(_BARE, pieces.append)
        text = "".join(pieces).strip()
        if not text or stream.is_at_end:
            writer.add_arguments(text)
            return False
        value = parse_json(text)
        writer.add_arguments(json.dumps(text if value is None and text != "null" else value, ensure_ascii=False))
        return True


FUNCTION_GEMMA = ToolFormat(
    "functiongemma",
    GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>").parse,
    template_markers=("<start_function_call>",),
    call_begins=("<start_function_call>",),
    markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    loose_call=("<start_function_call>call:", "<end_function_call>"),
)
GEMMA4 = ToolFormat(
    "gemma4",
    GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>').parse,
    template_markers=("<|tool_call>call:",),
    call_begins=("<|tool_call>",),
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    loose_call=("<|tool_call>call:", "<tool_call|>"),
)
