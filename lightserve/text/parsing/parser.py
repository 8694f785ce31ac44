"""The parser of one output: reasoning first, then content and tool calls."""

from __future__ import annotations

from lightserve.text.parsing.delta_writer import DeltaWriter, joined
from lightserve.text.parsing.deltas import Content, Delta
from lightserve.text.parsing.text_stream import Incremental, TextStream
from lightserve.text.parsing.tool_calls.base import Parse


class OutputParser:
    """Parses an output while it arrives. The joined deltas of ``push`` and ``finish`` do not depend on where the text
    was split. It never raises: text that no format matches is content."""

    def __init__(self, parse: Parse, writer: DeltaWriter) -> None:
        self.writer = writer
        self._stream = TextStream()
        self._steps = parse(self._stream, writer)
        next(self._steps)

    def push(self, text: str) -> list[Delta]:
        deltas = self.writer.deltas = []
        stream = self._stream
        emit_plain = stream.emit_plain
        if emit_plain is not None and stream.is_plain(text):  # most tokens: no need to run the parser
            emit_plain(text)
            return deltas
        stream.feed(text)
        next(self._steps, None)
        return joined(deltas)

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """``is_cut``: the model did not end the output. A call that has no name yet is dropped then."""
        deltas = self.writer.deltas = []
        self._stream.close(is_cut)
        next(self._steps, None)
        self.writer.finish()
        if is_cut and self.writer.only_calls:
            deltas = [delta for delta in deltas if not isinstance(delta, Content)]
        return joined(deltas)


def parse_content(stream: TextStream, writer: DeltaWriter) -> Incremental[None]:
    """The parser of an output without tool calls: all text is content."""
    yield from stream.emit_until((), writer.add_plain_content)
