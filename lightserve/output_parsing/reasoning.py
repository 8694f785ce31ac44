"""What a model thinks before it answers, between a pair of tags."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.errors import ServerError
from lightserve.output_parsing.deltas import Content, Delta, Reasoning
from lightserve.output_parsing.tape import Steps, Tape


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str
    end: str
    is_implied: bool = False  # the model may leave out the first tag: it thinks unless the prompt says otherwise

    def begins_inside(self, prompt: str, is_continued: bool = False) -> bool:
        """Whether an answer to this prompt begins within the tags. ``is_continued``: it ends in the answer's text."""
        if is_continued:
            return prompt.rfind(self.begin) > prompt.rfind(self.end)
        ending = prompt.rstrip()
        return ending.endswith(self.begin) or (self.is_implied and not ending.endswith(self.end))


THINK = ReasoningFormat("<think>", "</think>")
KNOWN = (
    THINK,
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("◁think▷", "◁/think▷"),
)
BY_NAME = {"qwen3": THINK, "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True)}


def reasoning_format(choice: str, template: str) -> ReasoningFormat | None:
    """By name or as ``BEGIN,END``; ``auto``: the one whose tags the chat template has. None where there is none."""
    if choice == "none":
        return None
    if choice == "auto":
        return next((one for one in KNOWN if one.end in template), None)
    begin, _, end = choice.partition(",")
    if choice not in BY_NAME and not (begin and end):
        known = ", ".join(["auto", "none", *BY_NAME])
        raise ServerError(f"reasoning_parser={choice!r}: choose one of {known}, or give two tags as BEGIN,END")
    return BY_NAME.get(choice) or ReasoningFormat(begin, end)


class ReasoningParser:
    """Splits an output into reasoning and content. White space beside the tags is left out."""

    def __init__(self, form: ReasoningFormat, is_inside: bool) -> None:
        self.is_reasoning = is_inside
        self._form = form
        self._tape = Tape()
        self._deltas: list[Delta] = []
        self._space = ""  # at the end of the reasoning, shown when more of it follows
        self._steps = self._parse()
        next(self._steps)

    def push(self, text: str) -> list[Delta]:
        self._tape.feed(text)
        return self._resume()

    def finish(self) -> list[Delta]:
        self._tape.close()
        return self._resume()

    def _resume(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _parse(self) -> Steps[None]:
        tape = self._tape
        tape.mark()
        yield from tape.skip_space()
        has_tag = yield from tape.accept(self._form.begin)  # a model may repeat the one in the prompt
        skipped = tape.unmark()
        self.is_reasoning = self.is_reasoning or has_tag
        if self.is_reasoning:
            yield from tape.skip_space()
            yield from tape.pass_until((self._form.end,), self._think)
            self.is_reasoning = False
            yield from tape.skip_space()
        else:
            self._answer(skipped)
        yield from tape.pass_until((), self._answer)

    def _think(self, text: str) -> None:
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if shown:
            self._deltas.append(Reasoning(shown))

    def _answer(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))
