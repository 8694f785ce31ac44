"""The parser of one output: reasoning first, then content and tool calls."""

from __future__ import annotations

from lightserve.output_parsing.delta_writer import DeltaWriter
from lightserve.output_parsing.deltas import Content, Delta
from lightserve.output_parsing.reasoning import ReasoningParser
from lightserve.output_parsing.text_stream import TextStream
from lightserve.output_parsing.tool_calls.base import Parse


class ToolCallParser:
    def __init__(self, parse: Parse, writer: DeltaWriter) -> None:
        self._stream = TextStream()
        self._writer = writer
        self._steps = parse(self._stream, writer)
        next(self._steps)

    def push(self, text: str) -> list[Delta]:
        self._stream.feed(text)
        next(self._steps, None)
        return self._writer.take_deltas()

    def finish(self) -> list[Delta]:
        self._stream.close()
        next(self._steps, None)
        self._writer.finish()
        return self._writer.take_deltas()


class OutputParser:
    """Parses an output while it arrives. The joined deltas of ``push`` and ``finish`` do not depend on where the text
    was split. It never raises: text that no format matches is content."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolCallParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def push(self, text: str) -> list[Delta]:
        if self._reasoning is None:
            return self._content(text)
        return self._after_reasoning(self._reasoning.push(text))

    def finish(self) -> list[Delta]:
        deltas = [] if self._reasoning is None else self._after_reasoning(self._reasoning.finish())
        return deltas if self._tools is None else deltas + self._tools.finish()

    def _after_reasoning(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        return [
            one for delta in deltas for one in (self._content(delta.text) if isinstance(delta, Content) else [delta])
        ]

    def _content(self, text: str) -> list[Delta]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._tools.push(text)
