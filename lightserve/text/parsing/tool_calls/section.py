"""Calls in a section, each between its own markers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightserve.text.parsing.delta_writer import DeltaWriter
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import add_no_call


@dataclass(frozen=True, slots=True)
class Section:
    begin: str
    end: str
    call_begin: str
    # Reads what follows call_begin. Returns False, and keeps the mark, if it is not a call.
    read_call: Callable[[TextStream, DeltaWriter], Incremental[bool]]

    def parse(self, stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
        """Models sometimes omit the start of the section, so a call outside of one counts too."""
        while marker := (yield from stream.emit_until((self.begin, self.call_begin), writer.add_content)):
            stream.mark(len(marker))
            is_call = marker == self.call_begin or (yield from stream.accept_after_space(self.call_begin))
            if is_call and (yield from self.read_call(stream, writer)):
                yield from stream.accept_end(self.end)
            else:
                add_no_call(stream, writer)
