"""Responses of /api/chat and /api/generate: one JSON object, a stream of one JSON object per line, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.chat.choice_parser import ChoiceParser
from lightserve.httpserver.chat.output import arguments_object
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import JsonObject, json_response
from lightserve.httpserver.http.errors import ErrorFormat, error_object
from lightserve.httpserver.http.sse import EventStream, EventWriter, GenerationEvents, until_disconnect
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.logprobs import finite_logprob
from lightserve.text.parsing import Call, CallArguments, CallStart, Content, Delta, Reasoning

NS = 1_000_000_000
PATH = "/api"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an endpoint writes what the model says. ``fields`` takes content, thinking and tool calls."""

    before_content: bytes
    after_content: bytes
    fields: Callable[[str, str, list[JsonObject]], JsonObject]


def _message_fields(content: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
    return {"message": {"role": "assistant", "content": content, **_given(thinking=thinking, tool_calls=calls)}}


def _response_fields(content: str, thinking: str, calls: list[JsonObject]) -> JsonObject:
    return {"response": content, **_given(thinking=thinking)}


def _given(**fields: Any) -> JsonObject:
    return {name: value for name, value in fields.items() if value}


CHAT = Layout(b'"message":{"role":"assistant","content":', b"}", _message_fields)
GENERATE = Layout(b'"response":', b"", _response_fields)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What to write about a generation."""

    layout: Layout
    model: str  # the name that the request has
    parser: ChoiceParser | None  # None: the whole output is content
    logprobs_of: Callable[[StrOut], JsonObject] | None = None
    context_ids: list[int] | None = None  # of the prompt; None: the response has no context


class NdjsonStream(EventStream):
    media_type = "application/x-ndjson"


async def respond(request: Request, is_stream: bool, generation: Generation, spec: OutputSpec) -> Response:
    if is_stream:
        lines = GenerationEvents(generation, LineWriter(spec, generation.log), generation.log.request_id)
        return await NdjsonStream.open(request, lines)
    collected = Collected(spec, generation.log)
    await until_disconnect(request, _collect(generation, collected))
    return json_response(collected.body())


async def _collect(generation: Generation, collected: Collected) -> None:
    async with generation:
        async for outs in generation:
            for _, out in outs:
                collected.add(out)


class _Output:
    """What both forms of a response need: the calls, the times and the end of one output."""

    def __init__(self, spec: OutputSpec, log: AccessLog) -> None:
        self._spec = spec
        self._log = log
        self._ids = None if spec.context_ids is None else [*spec.context_ids]
        self._calls = 0
        self._open_call: tuple[Call, list[str]] | None = None
        self._first_s: float | None = None
        self._queue_s = 0.0
        self._is_truncated = False

    def _count(self, out: StrOut) -> None:
        """Take times, ids and the end of a token."""
        if self._first_s is None:
            self._first_s = time.monotonic()
            self._queue_s = 0.0 if out.admission is None else out.admission.queue_s
        if self._ids is not None:
            self._ids.append(out.token.id)
        if out.finish_reason is FinishReason.LENGTH:
            self._is_truncated = True

    def _deltas(self, out: StrOut) -> Sequence[Delta]:
        if self._spec.parser is not None:
            return self._spec.parser.push(out)
        return (Content(out.text),) if out.text else ()

    def _logprobs(self, out: StrOut) -> list[JsonObject] | None:
        """Call it after the deltas of the token were taken."""
        is_hidden = self._spec.parser is not None and self._spec.parser.is_hidden
        return None if self._spec.logprobs_of is None or is_hidden else [self._spec.logprobs_of(out)]

    def _whole_calls(self, delta: Delta | None) -> list[JsonObject]:
        """The call that ends here, because another delta or None, the end, follows. Ollama writes whole calls."""
        if isinstance(delta, CallArguments) and self._open_call is not None:
            self._open_call[1].append(delta.text)
            return []
        ended, self._open_call = self._open_call, None
        if isinstance(delta, CallStart):
            self._open_call = (Call(delta.id, delta.name), [])
        if ended is None:
            return []
        call, pieces = ended
        function = {"index": self._calls, "name": call.name, "arguments": arguments_object("".join(pieces))}
        self._calls += 1
        return [{"id": call.id, "function": function}]

    def _end(self) -> JsonObject:
        """The fields of the last object."""
        end_s, log = time.monotonic(), self._log
        first_s = end_s if self._first_s is None else self._first_s
        context = {} if self._ids is None else {"context": self._ids}
        return {
            "done": True,
            "done_reason": "length" if self._is_truncated else "stop",
            **context,
            "total_duration": _ns(end_s - log.arrived_s),
            "load_duration": 0,
            "prompt_eval_count": log.prompt_tokens,
            "prompt_eval_duration": _ns(first_s - log.arrived_s - self._queue_s),
            "eval_count": log.output_tokens,
            "eval_duration": _ns(end_s - first_s),
        }


class Collected(_Output):
    """One output as a whole."""

    def __init__(self, spec: OutputSpec, log: AccessLog) -> None:
        super().__init__(spec, log)
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._whole: list[JsonObject] = []
        self._all_logprobs: list[JsonObject] = []

    def add(self, out: StrOut) -> None:
        self._count(out)
        for delta in self._deltas(out):
            self._whole += self._whole_calls(delta)
            if isinstance(delta, Content):
                self._content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self._thinking.append(delta.text)
        self._all_logprobs += self._logprobs(out) or ()

    def body(self) -> JsonObject:
        calls = self._whole + self._whole_calls(None)
        content_fields = self._spec.layout.fields("".join(self._content), "".join(self._thinking), calls)
        head = {"model": self._spec.model, "created_at": timestamp()}
        return {**head, **content_fields, **_given(logprobs=self._all_logprobs), **self._end()}


class LineWriter(_Output, EventWriter):
    """Writes a line for every delta. The JSON around a piece of text is prepared once."""

    def __init__(self, spec: OutputSpec, log: AccessLog) -> None:
        super().__init__(spec, log)
        self._head = b'{"model":%b,"created_at":"' % orjson.dumps(spec.model)
        self._before_content = b'",' + spec.layout.before_content
        self._before_thinking = self._before_content + b'"","thinking":'
        self._after_text = spec.layout.after_content + b',"done":false}\n'

    def write(self, outs: Iterable[tuple[int, StrOut]]) -> bytes:
        head = self._head + timestamp().encode()
        lines: list[bytes] = []
        for _, out in outs:
            self._count(out)
            if self._spec.logprobs_of is not None:
                lines.append(self._line_with_logprobs(head, out))
                continue
            for delta in self._deltas(out):
                lines += self._lines(head, delta)
            if out.finish_reason is not None:
                lines += self._call_lines(head, None)
        return b"".join(lines)

    def end(self) -> bytes:
        content_fields = self._spec.layout.fields("", "", [])
        return _line({"model": self._spec.model, "created_at": timestamp(), **content_fields, **self._end()})

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return _line({"error": error_object(error, request_id)["error"]["message"]})

    def keep_alive(self) -> bytes:
        """Nothing: lines of JSON have no comments."""
        return b""

    def _lines(self, head: bytes, delta: Delta) -> Sequence[bytes]:
        """The pieces of the lines for a delta; a call that ends before it comes first."""
        if isinstance(delta, Content):
            before = self._before_content
        elif isinstance(delta, Reasoning):
            before = self._before_thinking
        else:
            return self._call_lines(head, delta)
        pieces = (head, before, orjson.dumps(delta.text), self._after_text)
        return pieces if self._open_call is None else (*self._call_lines(head, delta), *pieces)

    def _call_lines(self, head: bytes, delta: Delta | None) -> Sequence[bytes]:
        return [self._line(head, self._spec.layout.fields("", "", [call])) for call in self._whole_calls(delta)]

    def _line_with_logprobs(self, head: bytes, out: StrOut) -> bytes:
        """One line for each token, even if its text is held back."""
        content, thinking, calls = "", "", []
        for delta in self._deltas(out):
            calls += self._whole_calls(delta)
            if isinstance(delta, Content):
                content += delta.text
            elif isinstance(delta, Reasoning):
                thinking += delta.text
        calls += self._whole_calls(None) if out.finish_reason is not None else []
        content_fields = self._spec.layout.fields(content, thinking, calls)
        return self._line(head, content_fields | _given(logprobs=self._logprobs(out)))

    def _line(self, head: bytes, fields: JsonObject) -> bytes:
        return head + b'",' + orjson.dumps({**fields, "done": False})[1:] + b"\n"


def loaded_response(layout: Layout, model: str) -> Response:
    """What a request without a prompt gets."""
    content_fields = layout.fields("", "", [])
    return json_response(
        {"model": model, "created_at": timestamp(), **content_fields, "done": True, "done_reason": "load"}
    )


def token_logprobs(tokenizer: Tokenizer, k: int) -> Callable[[StrOut], JsonObject]:
    token_bytes = tokenizer.decoder.token_bytes

    def entry(token_id: int, logprob: float | None) -> JsonObject:
        data = token_bytes(token_id)
        shown_logprob = finite_logprob(float("-inf") if logprob is None else logprob)
        return {"token": data.decode(errors="replace"), "logprob": shown_logprob, "bytes": list(data)}

    def of_token(out: StrOut) -> JsonObject:
        top = [entry(token_id, logprob) for token_id, logprob in (out.token.top_logprobs or ())[:k]]
        return {**entry(out.token.id, out.token.logprob), **_given(top_logprobs=top)}

    return of_token


def timestamp(at: datetime | None = None) -> str:
    """In UTC with microseconds, as Ollama writes it; None: now."""
    at = at or datetime.now(UTC)
    return at.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _line(value: JsonObject) -> bytes:
    return orjson.dumps(value) + b"\n"


def _ns(seconds: float) -> int:
    return max(int(seconds * NS), 1)  # clients divide by it


def ollama_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    return {"error": message}


ERROR_FORMAT = ErrorFormat(PATH, ollama_error)
