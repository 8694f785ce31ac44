"""What a parser of tool calls has found, as deltas."""

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
    """As OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Scribe:
    """Writes deltas. White space after a call is layout of the format and left out, and so is that before a call
    which is the end of the content."""

    def __init__(self, tools: Tools, new_id: NewId = call_id, max_calls: int | None = None) -> None:
        self.tools = tools
        self._new_id = new_id
        self._max_calls = max_calls
        self._n_calls = 0
        self._deltas: list[Delta] = []
        self._space = ""  # at the end of the content, shown when more content follows
        self._is_after_call = False

    def content(self, text: str) -> None:
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

    def start(self, name: str, given_id: str | None = None) -> None:
        """A call; one beyond those that are wanted is left out, with its arguments."""
        self._is_after_call = True
        self._n_calls += 1
        if self._is_wanted:
            self._deltas.append(CallStart(self._n_calls - 1, given_id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        if text and self._is_wanted:
            self._deltas.append(CallArguments(self._n_calls - 1, text))

    def call(self, name: str, arguments: Any) -> None:
        """A call that is known as a whole."""
        self.start(name)
        self.arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))

    def end(self) -> None:
        """No more comes: white space at the end is content, unless it was before a call."""
        if self._space and not self._is_after_call:
            self._deltas.append(Content(self._space))

    def take(self) -> list[Delta]:
        """What was written since the last time, neighbours of a kind as one."""
        deltas, self._deltas = self._deltas, []
        return _joined(deltas) if len(deltas) > 1 else deltas

    @property
    def _is_wanted(self) -> bool:
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
