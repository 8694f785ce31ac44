"""Answers to chats as lists of parts: reasoning, text and calls, in the order in which the model writes them.

Schemas that show an answer so differ in how they write a part and what they say around them all.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.chat.output import ChoiceOutput
from lightserve.httpserver.manager import Generation
from lightserve.httpserver.wire.access_log import AccessLog
from lightserve.httpserver.wire.json_response import json_response
from lightserve.httpserver.wire.sse import EventStream, events_of, until_disconnect
from lightserve.io_struct import FinishReason, StrOut
from lightserve.output_parsing import CallArguments, CallStart, Content, Delta, Reasoning

Object = dict[str, Any]
Events = list[Object]  # each has a type, by which it is named in a stream too


class Kind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""  # of the tool
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False  # it has ended, and not by max_tokens

    @property
    def text(self) -> str:
        """Of a call: the JSON of its arguments."""
        return "".join(self.pieces)


class PartedAnswer(ABC):
    """One answer as it comes. Subclasses say which events tell of it; the whole answer is written at the end."""

    def __init__(self, output: ChoiceOutput, log: AccessLog) -> None:
        self.log = log
        self.output = output
        self.parts: list[Part] = []
        self.finish: StrOut | None = None
        self._open: Part | None = None
        self._has_begun = False

    @property
    def has_calls(self) -> bool:
        return any(part.kind is Kind.CALL for part in self.parts)

    @property
    def is_cut(self) -> bool:
        return self.finish is not None and self.finish.finish_reason is FinishReason.LENGTH

    @abstractmethod
    def whole(self) -> Object:
        """The answer as far as it has come."""

    @abstractmethod
    def opening(self) -> Events: ...

    @abstractmethod
    def begun(self, part: Part) -> Events: ...

    @abstractmethod
    def grown(self, part: Part, text: str) -> Events: ...

    @abstractmethod
    def ended(self, part: Part) -> Events: ...

    @abstractmethod
    def closing(self) -> Events: ...

    @abstractmethod
    def failed(self, error: LightserveError, request_id: str) -> Events: ...

    def add(self, out: StrOut) -> Events:
        events = [] if self._has_begun else self.opening()
        self._has_begun = True
        for delta in self.output.push(out):
            events += self._add(delta)
        if out.finish_reason is not None:
            self.finish = out
            events += self._end_part()
        return events

    def _add(self, delta: Delta) -> Events:
        match delta:
            case CallStart(_, call_id, name):
                return self._begin(Part(len(self.parts), Kind.CALL, call_id, name))
            case CallArguments(_, text):
                return self._grow(Kind.CALL, text)
            case Content(text):
                return self._grow(Kind.TEXT, text)
            case Reasoning(text):
                return self._grow(Kind.REASONING, text)

    def _begin(self, part: Part) -> Events:
        events = self._end_part()
        self._open = part
        self.parts.append(part)
        return events + self.begun(part)

    def _grow(self, kind: Kind, text: str) -> Events:
        """The part under way, or a new one; the arguments of a call always follow its start."""
        events: Events = []
        if self._open is None or self._open.kind is not kind:
            events = self._begin(Part(len(self.parts), kind))
        part = self.parts[-1]
        part.pieces.append(text)
        return events + self.grown(part, text)

    def _end_part(self) -> Events:
        part, self._open = self._open, None
        if part is None:
            return []
        part.is_complete = not self.is_cut
        return self.ended(part)


class PartEvents:
    """Writes an answer as named server-sent events."""

    def __init__(self, answer: PartedAnswer) -> None:
        self._answer = answer

    def write(self, news: Iterable[tuple[int, StrOut]]) -> bytes:
        return b"".join([_encoded(event) for _, out in news for event in self._answer.add(out)])

    def end(self) -> bytes:
        return b"".join(map(_encoded, self._answer.closing()))

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"".join(map(_encoded, self._answer.failed(error, request_id)))


async def respond_in_parts(
    request: Request, is_stream: bool | None, generation: Generation, answer: PartedAnswer
) -> Response:
    if is_stream:
        return await EventStream.open(request, events_of(generation, PartEvents(answer), generation.log.request_id))
    await until_disconnect(request, _collect(generation, answer))
    return json_response(answer.whole())


async def _collect(generation: Generation, answer: PartedAnswer) -> None:
    async with generation:
        async for news in generation:
            for _, out in news:
                answer.add(out)


def _encoded(event: Object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
