"""Turns the findings of a tool-call parser into deltas."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from lightserve.output_parsing.deltas import CallArguments, CallStart, Content, Delta

NewId = Callable[[], str]
Tools = Mapping[str, Mapping[str, Any]]  # name: JSON schema of the arguments


def call_id() -> str:
    """An id like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's chat templates reject other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class DeltaWriter:
    """Collects deltas. White space after a call belongs to the format and is dropped, and so is white space between
    the content and a call."""

    def __init__(self, tools: Tools, new_id: NewId = call_id, max_calls: int | None = None) -> None:
        self.tools = tools
        self._new_id = new_id
        self._max_calls = max_calls
        self._n_calls = 0
        self._deltas: list[Delta] = []
        self._space = ""  # at the end of the content, emitted when more content follows
        self._is_after_call = False

    def add_content(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if not text:
            return
        self._is_after_call = False
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if shown:
            self._deltas.append(Content(shown))

    def start_call(self, name: str, model_id: str | None = None) -> None:
        """Start a call. Calls beyond ``max_calls`` are dropped with their arguments."""
        self._is_after_call = True
        self._n_calls += 1
        if self._is_allowed:
            self._deltas.append(CallStart(self._n_calls - 1, model_id or self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        if text and self._is_allowed:
            self._deltas.append(CallArguments(self._n_calls - 1, text))

    def add_call(self, name: str, arguments: Any) -> None:
        """Add a whole call."""
        self.start_call(name)
        self.add_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))

    def finish(self) -> None:
        """End the output: white space at its end is content, unless it follows a call."""
        if self._space and not self._is_after_call:
            self._deltas.append(Content(self._space))

    def take_deltas(self) -> list[Delta]:
        """The deltas since the last time. Consecutive deltas of one kind are joined."""
        deltas, self._deltas = self._deltas, []
        return _joined(deltas) if len(deltas) > 1 else deltas

    @property
    def _is_allowed(self) -> bool:
        return self._max_calls is None or self._n_calls <= self._max_calls


def _joined(deltas: list[Delta]) -> list[Delta]:
    return [_join(list(group)) for _, group in groupby(deltas, _kind)]


def _kind(delta: Delta) -> tuple[type[Delta], int]:
    return type(delta), delta.index if isinstance(delta, CallStart | CallArguments) else 0


def _join(same: list[Delta]) -> Delta:
    match same[0]:
        case CallArguments(index, _):
            return CallArguments(index, "".join(delta.text for delta in same if isinstance(delta, CallArguments)))
        case Content():
            return Content("".join(delta.text for delta in same if isinstance(delta, Content)))
        case other:
            return other
