"""Turns the findings of a parser into deltas."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from lightserve.text.json_schema.tool_schema import ToolSchema
from lightserve.text.parsing.deltas import CallArguments, CallStart, Content, Delta, Reasoning

NewId = Callable[[], str]
Tools = Mapping[str, ToolSchema]  # by name


def call_id() -> str:
    """An id like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's chat templates reject other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class DeltaWriter:
    """Collects deltas. White space after a call belongs to the format and is dropped, and so is white space between
    the content and a call, and at the end of the reasoning."""

    def __init__(
        self,
        tools: Tools,
        new_id: NewId = call_id,
        max_calls: int | None = None,
        separates_reasoning: bool = True,
        only_calls: bool = False,
    ) -> None:
        """``separates_reasoning`` false: reasoning is content. ``only_calls``: a grammar forces calls."""
        self.tools = tools
        self.only_calls = only_calls
        self.has_calls = False
        self.is_reasoning = False  # the text so far ends inside the reasoning
        self.is_undecided = False  # the latest text is reasoning or a call: this depends on the text that follows
        self.is_call_open = False  # the arguments of the last call are incomplete
        self._new_id = new_id
        self._reasoning_type = Reasoning if separates_reasoning else Content
        self._max_calls = max_calls
        self._n_calls = 0
        self.deltas: list[Delta] = []  # of the latest text
        self._space: list[str] = []  # at the end of the content or reasoning, emitted when more of it follows
        self._is_after_call = False
        self._is_dropped = False  # the last call

    def add_content(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        shown = text.rstrip()
        if self._space or shown != text:
            shown = self._between_spaces(text, shown)
        if shown:
            self.deltas.append(Content(shown))

    def add_plain_content(self, text: str) -> None:
        """Add content where no call can follow: no white space is held back."""
        if text:
            self.deltas.append(Content(text))

    def add_reasoning(self, text: str) -> None:
        shown = text.rstrip()
        if self._space or shown != text:
            shown = self._between_spaces(text, shown)
        if shown:
            self.deltas.append(self._reasoning_type(shown))

    def end_reasoning(self) -> None:
        self.is_reasoning = False
        self._space.clear()

    def _between_spaces(self, text: str, shown: str) -> str:
        """What to emit of a text: with the white space before it, without the white space at its end."""
        n_shown = len(shown)
        if shown and self._space:
            shown = "".join([*self._space, shown])
            self._space.clear()
        if n_shown < len(text):
            self._space.append(text[n_shown:])
        return shown

    def start_call(self, name: str, model_id: str | None = None) -> None:
        """Start a call. Calls beyond ``max_calls`` are dropped with their arguments."""
        self._is_after_call = True
        self._n_calls += 1
        self._is_dropped = self._max_calls is not None and self._n_calls > self._max_calls
        if not self._is_dropped:
            self.has_calls = self.is_call_open = True
            self.deltas.append(CallStart(self._n_calls - 1, model_id or self._new_id(), name))

    def drop_call(self) -> None:
        """A call that has no name yet was cut off. White space before it is dropped as before any call."""
        self._space.clear()
        self._is_after_call = True

    def add_arguments(self, text: str) -> None:
        if text and not self._is_dropped:
            self.deltas.append(CallArguments(self._n_calls - 1, text))

    def end_call(self) -> None:
        """The arguments are complete."""
        self.is_call_open = False

    def add_call(self, name: str, arguments: Any) -> None:
        """Add a whole call."""
        self.start_call(name)
        self.add_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        self.end_call()

    def finish(self) -> None:
        """End the output: white space at its end is content, unless it follows a call or reasoning."""
        if self._space and not self._is_after_call and not self.is_reasoning:
            self.deltas.append(Content("".join(self._space)))


def joined(deltas: list[Delta]) -> list[Delta]:
    """Consecutive deltas of one kind become one."""
    if len(deltas) < 2:
        return deltas
    return [_join(list(group)) for _, group in groupby(deltas, _kind)]


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    return type(delta), delta.index if isinstance(delta, CallStart | CallArguments) else 0


def _join(same: list[Delta]) -> Delta:
    first = same[0]
    if len(same) == 1 or isinstance(first, CallStart):
        return first
    text = "".join(delta.text for delta in same)  # type: ignore[union-attr]  # none is a CallStart
    return CallArguments(first.index, text) if isinstance(first, CallArguments) else type(first)(text)
