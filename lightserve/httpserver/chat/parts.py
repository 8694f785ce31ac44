"""Chat responses that are lists of parts: reasoning, text and calls, in the order in which the model writes them.

OpenAI's Responses call a part an output item, Anthropic's Messages a content block. They differ in how they write it.
Nearly every token is one delta of the part that is open. So subclasses prepare the bytes around the text of a delta
when its part starts, and a token only joins bytes. All other events are rare and are written from objects.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.chat.choice_parser import ChoiceParser
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import JsonObject, json_response
from lightserve.httpserver.http.sse import EventStream, EventWriter, GenerationEvents, until_disconnect
from lightserve.mcp.toolbox import HostedTool
from lightserve.mcp.tools import ToolOutcome
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.text.parsing import CallArguments, CallStart, Content, Delta, Reasoning

Events = list[JsonObject]  # the type of each is its event name too
DELTA_TEXT = "\0delta\0"  # stands for the text in an event that split_event splits
_ENCODED_DELTA_TEXT = orjson.dumps(DELTA_TEXT)


class PartKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"
    ITEM = "item"  # of this server: it lists tools, or it made a call


# kind of the part that a delta belongs to
_KINDS: dict[type[Delta], PartKind] = {
    Content: PartKind.TEXT,
    Reasoning: PartKind.REASONING,
    CallArguments: PartKind.CALL,
}
_DELTAS = {kind: delta for delta, kind in _KINDS.items()}


@dataclass(slots=True)
class Part:
    index: int
    kind: PartKind
    call_id: str = ""
    name: str = ""  # of the tool
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False  # it has ended, and max_tokens did not truncate it
    outcome: ToolOutcome | None = None  # of a call that this server made
    item: JsonObject | None = None  # as the response shows it, if the model did not write it

    @property
    def text(self) -> str:
        """For a call: the JSON of its arguments, or the input of a custom tool."""
        return "".join(self.pieces)


class PartsResponse(EventWriter, ABC):
    """Collects one output. Subclasses write it: as events while it arrives, or as one body at the end.

    It is the EventWriter of its stream.
    """

    def __init__(self, parser: ChoiceParser, log: AccessLog) -> None:
        self.log = log
        self.parser = parser
        self.hosted: Mapping[str, HostedTool] = {}  # by the name of the function: what this server calls
        self.parts: list[Part] = []
        self.finish: StrOut | None = None
        self._open: Part | None = None
        self._open_type: type[Delta] | None = None  # of the deltas of the open part
        self._pieces: list[str] = []  # of the open part
        self._has_begun = False
        self._round_begin = 0  # the index of its first part
        self._round_end: StrOut | None = None  # the last token of a round while its calls are made
        self._earlier_reasoning_tokens = 0  # of earlier rounds

    @property
    def has_calls(self) -> bool:
        """Of the client's tools."""
        return any(map(self._is_for_client, self.parts))

    @property
    def waits_for_client(self) -> bool:
        """The last round has calls that only the client can make or approve."""
        return any(map(self._is_for_client, self.parts[self._round_begin :]))

    def _is_for_client(self, output_part: Part) -> bool:
        if output_part.kind is not PartKind.CALL:
            return False
        hosted = self.hosted.get(output_part.name)
        return hosted is None or hosted.needs_approval

    @property
    def reasoning_tokens(self) -> int:
        return self._earlier_reasoning_tokens + self.parser.reasoning_tokens

    @property
    def is_truncated(self) -> bool:
        return self.finish is not None and self.finish.finish_reason is FinishReason.LENGTH

    @abstractmethod
    def body(self) -> JsonObject:
        """The response with all parts so far."""

    @abstractmethod
    def on_start(self) -> Events: ...

    @abstractmethod
    def on_part_start(self, output_part: Part) -> Events: ...

    @abstractmethod
    def delta_event(self, text: str) -> bytes:
        """The encoded event of more text of the open part. ``on_part_start`` prepares what is the same in all of them:
        see ``split_event``. It is called for nearly every token."""

    @abstractmethod
    def on_part_end(self, output_part: Part) -> Events: ...

    def on_outcome(self, output_part: Part) -> Events:
        """This server has made the call: the part has its outcome. Only APIs that have such tools come here."""
        raise NotImplementedError

    @abstractmethod
    def on_end(self) -> Events: ...

    @abstractmethod
    def on_error(self, error: LightserveError, request_id: str) -> Events: ...

    def write(self, outs: Iterable[tuple[int, StrOut]]) -> bytes:
        """The tokens as named server-sent events."""
        events = [] if self._has_begun else encoded(self.on_start())
        self._has_begun = True
        push = self.parser.push
        for _, out in outs:
            for delta in push(out):
                if type(delta) is not self._open_type:
                    self._open_part(delta, events)
                    if isinstance(delta, CallStart):
                        continue
                text: str = delta.text  # type: ignore[union-attr]  # a CallStart is never of the open type
                self._pieces.append(text)
                events.append(self.delta_event(text))
            if out.finish_reason is not None:
                self.finish = out
                self._end_part(events)
        return b"".join(events)

    def begin(self) -> bytes:
        """What comes before the first token, if the response has more to say than its start."""
        self._has_begun = True
        return b"".join(encoded(self.on_start()))

    def take_calls(self) -> list[Part]:
        """The calls of the round that has ended which this server makes now. The response goes on while there are any:
        ``finish`` is None, until ``close_round``."""
        if self.finish is None or self.is_truncated:
            return []
        calls = list(filter(self._is_to_be_made, self.parts[self._round_begin :]))
        if calls:
            self._round_end, self.finish = self.finish, None
        return calls

    def _is_to_be_made(self, output_part: Part) -> bool:
        hosted = self.hosted.get(output_part.name) if output_part.kind is PartKind.CALL else None
        return hosted is not None and not hosted.needs_approval and output_part.outcome is None

    def add_outcome(self, output_part: Part, outcome: ToolOutcome) -> bytes:
        output_part.outcome = outcome
        return b"".join(encoded(self.on_outcome(output_part)))

    def begin_round(self, parser: ChoiceParser) -> None:
        """The model goes on with the outcomes of its calls."""
        self._earlier_reasoning_tokens += self.parser.reasoning_tokens
        self.parser, self._round_begin, self._round_end = parser, len(self.parts), None

    def close_round(self) -> None:
        """The last round had calls, and no other one follows."""
        if self._round_end is not None:
            self.finish, self._round_end = self._round_end, None

    def end(self) -> bytes:
        return b"".join(encoded(self.on_end()))

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"".join(encoded(self.on_error(error, request_id)))

    def _open_part(self, delta: Delta, events: list[bytes]) -> None:
        """Start the part that a delta belongs to. The arguments of a call always follow its start."""
        self._end_part(events)
        if isinstance(delta, CallStart):
            output_part = Part(len(self.parts), PartKind.CALL, delta.id, delta.name)
        else:
            output_part = Part(len(self.parts), _KINDS[type(delta)])
        self._open, self._pieces, self._open_type = output_part, output_part.pieces, _DELTAS[output_part.kind]
        self.parts.append(output_part)
        events += encoded(self.on_part_start(output_part))

    def _end_part(self, events: list[bytes]) -> None:
        output_part, self._open, self._open_type = self._open, None, None
        if output_part is not None:
            output_part.is_complete = not self.is_truncated
            events += encoded(self.on_part_end(output_part))


async def respond_in_parts(
    request: Request, is_stream: bool | None, generation: Generation, response: PartsResponse
) -> Response:
    if is_stream:
        events = GenerationEvents(generation, response, generation.log.request_id)
        return await EventStream.open(request, events)
    await collect_parts(request, generation, response)
    return json_response(response.body())


async def collect_parts(request: Request, generation: Generation, response: PartsResponse) -> None:
    """Run the generation until its end; stop it when the client disconnects."""
    await until_disconnect(request, _collect(generation, response))


async def _collect(generation: Generation, response: PartsResponse) -> None:
    async with generation:
        async for outs in generation:
            response.write(outs)


def encoded(events: Events) -> list[bytes]:
    return [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events]


def split_event(event: JsonObject) -> tuple[bytes, bytes]:
    """The encoded event before and after the text of a delta. The text in ``event`` is DELTA_TEXT."""
    [whole] = encoded([event])
    head, _, tail = whole.partition(_ENCODED_DELTA_TEXT)
    return head, tail
