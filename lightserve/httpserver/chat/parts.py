"""Chat responses that are lists of parts: reasoning, text and calls, in the order in which the model writes them.

OpenAI's Responses call a part an output item, Anthropic's Messages a content block. They differ in how they write it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.chat.output import ChoiceParser
from lightserve.httpserver.manager import Generation
from lightserve.httpserver.wire.access_log import AccessLog
from lightserve.httpserver.wire.body import JsonObject
from lightserve.httpserver.wire.json_response import json_response
from lightserve.httpserver.wire.sse import KEEP_ALIVE, EventStream, EventWriter, events_of, until_disconnect
from lightserve.io_struct import FinishReason, StrOut
from lightserve.output_parsing import CallArguments, CallStart, Content, Delta, Reasoning

Events = list[JsonObject]  # the type of each is its event name too


class PartKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    index: int
    kind: PartKind
    call_id: str = ""
    name: str = ""  # of the tool
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False  # it has ended, and max_tokens did not truncate it

    @property
    def text(self) -> str:
        """For a call: the JSON of its arguments."""
        return "".join(self.pieces)


class PartsResponse(ABC):
    """Collects one output. Subclasses write it: as events while it arrives, or as one body at the end."""

    keep_alive: ClassVar[bytes] = KEEP_ALIVE  # what a stream sends while it waits

    def __init__(self, parser: ChoiceParser, log: AccessLog) -> None:
        self.log = log
        self.parser = parser
        self.parts: list[Part] = []
        self.finish: StrOut | None = None
        self._open: Part | None = None
        self._has_begun = False

    @property
    def has_calls(self) -> bool:
        return any(part.kind is PartKind.CALL for part in self.parts)

    @property
    def is_truncated(self) -> bool:
        return self.finish is not None and self.finish.finish_reason is FinishReason.LENGTH

    @abstractmethod
    def body(self) -> JsonObject:
        """The response with all parts so far."""

    @abstractmethod
    def on_start(self) -> Events: ...

    @abstractmethod
    def on_part_start(self, part: Part) -> Events: ...

    @abstractmethod
    def on_part_delta(self, part: Part, text: str) -> Events: ...

    @abstractmethod
    def on_part_end(self, part: Part) -> Events: ...

    @abstractmethod
    def on_end(self) -> Events: ...

    @abstractmethod
    def on_error(self, error: LightserveError, request_id: str) -> Events: ...

    def add(self, out: StrOut) -> Events:
        events = [] if self._has_begun else self.on_start()
        self._has_begun = True
        for delta in self.parser.push(out):
            events += self._add(delta)
        if out.finish_reason is not None:
            self.finish = out
            events += self._end_part()
        return events

    def _add(self, delta: Delta) -> Events:
        match delta:
            case CallStart(_, call_id, name):
                return self._start_part(Part(len(self.parts), PartKind.CALL, call_id, name))
            case CallArguments(_, text):
                return self._append(PartKind.CALL, text)
            case Content(text):
                return self._append(PartKind.TEXT, text)
            case Reasoning(text):
                return self._append(PartKind.REASONING, text)

    def _start_part(self, part: Part) -> Events:
        events = self._end_part()
        self._open = part
        self.parts.append(part)
        return events + self.on_part_start(part)

    def _append(self, kind: PartKind, text: str) -> Events:
        """Append to the open part, or to a new one; the arguments of a call always follow its start."""
        events: Events = []
        if self._open is None or self._open.kind is not kind:
            events = self._start_part(Part(len(self.parts), kind))
        part = self.parts[-1]
        part.pieces.append(text)
        return events + self.on_part_delta(part, text)

    def _end_part(self) -> Events:
        part, self._open = self._open, None
        if part is None:
            return []
        part.is_complete = not self.is_truncated
        return self.on_part_end(part)


class PartsEventWriter(EventWriter):
    """Writes a response as named server-sent events."""

    def __init__(self, response: PartsResponse) -> None:
        self._response = response

    def write(self, outs: Iterable[tuple[int, StrOut]]) -> bytes:
        return b"".join([_encoded(event) for _, out in outs for event in self._response.add(out)])

    def end(self) -> bytes:
        return b"".join(map(_encoded, self._response.on_end()))

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"".join(map(_encoded, self._response.on_error(error, request_id)))

    def keep_alive(self) -> bytes:
        return self._response.keep_alive


async def respond_in_parts(
    request: Request, is_stream: bool | None, generation: Generation, response: PartsResponse
) -> Response:
    if is_stream:
        events = events_of(generation, PartsEventWriter(response), generation.log.request_id)
        return await EventStream.open(request, events)
    await until_disconnect(request, _collect(generation, response))
    return json_response(response.body())


async def _collect(generation: Generation, response: PartsResponse) -> None:
    async with generation:
        async for outs in generation:
            for _, out in outs:
                response.add(out)


def _encoded(event: JsonObject) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))
