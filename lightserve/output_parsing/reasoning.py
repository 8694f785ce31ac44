"""The reasoning of a model before its answer, between a pair of tags."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.errors import ServerError
from lightserve.output_parsing.deltas import Content, Delta, Reasoning
from lightserve.output_parsing.text_stream import Incremental, TextStream


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str
    is_implied: bool = False  # the model may omit the first tag: it reasons unless the prompt disables it

    def begins_inside(self, prompt: str, is_continued: bool = False) -> bool:
        """Whether the output starts inside the tags. ``is_continued``: the prompt ends with the start of the output."""
        if is_continued:
            return prompt.rfind(self.begin) > prompt.rfind(self.end)
        ending = prompt.rstrip()
        return ending.endswith(self.begin) or (self.is_implied and not ending.endswith(self.end))


THINK = ReasoningFormat("<think>", "</think>")
KNOWN_FORMATS = (
    THINK,
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("◁think▷", "◁/think▷"),
)
FORMATS_BY_NAME = {"qwen3": THINK, "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True)}


def reasoning_format(choice: str, template: str) -> ReasoningFormat | None:
    """The format by name or as ``BEGIN,END``; ``auto``: the one whose tags are in the chat template, or None."""
    if choice == "none":
        return None
    if choice == "auto":
        return next((one for one in KNOWN_FORMATS if one.end in template), None)
    begin, _, end = choice.partition(",")
    if choice not in FORMATS_BY_NAME and not (begin and end):
        known = ", ".join(["auto", "none", *FORMATS_BY_NAME])
        raise ServerError(f"unknown --reasoning_parser {choice!r}; use one of {known}, or two tags as BEGIN,END")
    return FORMATS_BY_NAME.get(choice) or ReasoningFormat(begin, end)


class ReasoningParser:
    """Splits an output into reasoning and content. White space next to the tags is dropped."""

    def __init__(self, reasoning_format: ReasoningFormat, is_inside: bool) -> None:
        self.is_reasoning = is_inside
        self._format = reasoning_format
        self._stream = TextStream()
        self._deltas: list[Delta] = []
        self._space = ""  # at the end of the reasoning, emitted when more reasoning follows
        self._steps = self._parse()
        next(self._steps)

    def push(self, text: str) -> list[Delta]:
        self._stream.feed(text)
        return self._resume()

    def finish(self) -> list[Delta]:
        self._stream.close()
        return self._resume()

    def _resume(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _parse(self) -> Incremental[None]:
        stream = self._stream
        stream.mark()
        yield from stream.skip_space()
        has_tag = yield from stream.accept(self._format.begin)  # a model may repeat the tag of the prompt
        skipped = stream.take_marked()
        self.is_reasoning = self.is_reasoning or has_tag
        if self.is_reasoning:
            yield from stream.skip_space()
            yield from stream.emit_until((self._format.end,), self._emit_reasoning)
            self.is_reasoning = False
            yield from stream.skip_space()
        else:
            self._emit_content(skipped)
        yield from stream.emit_until((), self._emit_content)

    def _emit_reasoning(self, text: str) -> None:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if shown:
            self._deltas.append(Reasoning(shown))

    def _emit_content(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))
