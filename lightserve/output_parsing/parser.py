"""One answer's parser: reasoning first, then content and tool calls."""

from __future__ import annotations

from lightserve.output_parsing.deltas import Content, Delta
from lightserve.output_parsing.reasoning import ReasoningParser
from lightserve.output_parsing.scribe import Scribe
from lightserve.output_parsing.tape import Tape
from lightserve.output_parsing.tool_calls.base import Parse


class ToolCallParser:
    def __init__(self, parse: Parse, scribe: Scribe) -> None:
        self._tape = Tape()
        self._scribe = scribe
        self._steps = parse(self._tape, scribe)
        next(self._steps)

    def push(self, text: str) -> list[Delta]:
        self._tape.feed(text)
        next(self._steps, None)
        return self._scribe.take()

    def finish(self) -> list[Delta]:
        self._tape.close()
        next(self._steps, None)
        self._scribe.end()
        return self._scribe.take()


class OutputParser:
    """The text of an answer as it comes, taken apart. Folding what ``push`` and ``finish`` return gives the same for
    every way to cut the text. Nothing raises: what cannot be understood is content."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolCallParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
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
