"""The output of one choice, token by token."""

from __future__ import annotations

from lightserve.httpserver.chat.custom_input import CustomCallDecoder
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.text.parsing import Delta, OutputParser, Reasoning


class ChoiceParser:
    """Parses the output of one choice as its tokens arrive."""

    def __init__(self, parser: OutputParser, shows_reasoning: bool) -> None:
        self.reasoning_tokens = 0  # including the tags
        self.is_hidden = False  # the last token is reasoning that the response leaves out
        self._parser = parser
        self._writer = parser.writer
        self._shows_reasoning = shows_reasoning
        self._is_cut = False
        self._undecided_tokens = 0  # of reasoning or of a call in it: the tokens that follow decide

    def push(self, out: StrOut) -> list[Delta]:
        writer = self._writer
        is_reasoning = writer.is_reasoning
        deltas = self._parser.push(out.text)
        is_reasoning = is_reasoning or writer.is_reasoning
        if is_reasoning:
            if writer.is_undecided or self._undecided_tokens:
                self._count_undecided()
            else:
                self.reasoning_tokens += 1
        if out.finish_reason is not None:
            deltas += self._finish(out)
        if self._shows_reasoning:
            return deltas
        self.is_hidden = is_reasoning
        return [delta for delta in deltas if not isinstance(delta, Reasoning)]

    @property
    def has_calls(self) -> bool:
        """Whether there is a call. One that a stop string cut off does not count: its arguments are not JSON."""
        return self._writer.has_calls and not self._is_cut

    def _count_undecided(self) -> None:
        if self._writer.is_undecided:
            self._undecided_tokens += 1
        else:
            self.reasoning_tokens += 1 + self._undecided_tokens
            self._undecided_tokens = 0

    def _finish(self, out: StrOut) -> list[Delta]:
        is_stopped = isinstance(out.stop_reason, str)
        deltas = self._parser.finish(is_cut=is_stopped or out.finish_reason is not FinishReason.STOP)
        self._is_cut = self._writer.is_call_open and is_stopped
        return deltas


class CustomToolParser(ChoiceParser):
    """The same, where some tools are custom."""

    def __init__(self, parser: OutputParser, shows_reasoning: bool, custom_tools: frozenset[str]) -> None:
        super().__init__(parser, shows_reasoning)
        self._decoder = CustomCallDecoder(custom_tools)

    def push(self, out: StrOut) -> list[Delta]:
        return self._decoder.decode(super().push(out), is_end=out.finish_reason is not None)
