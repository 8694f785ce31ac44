"""Responses of OpenAI's chat and completions as server-sent events.

The JSON around a piece of text is prepared once a choice: a token without extras only joins bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.chat.output import ChoiceParser
from lightserve.httpserver.fields.generation import GenerationBody
from lightserve.httpserver.manager import Generation
from lightserve.httpserver.openai.response import (
    ResponseSpec,
    collect_response,
    finish_fields,
    prompt_logprobs_field,
    prompt_only_end,
    usage_fields,
)
from lightserve.httpserver.wire.access_log import AccessLog
from lightserve.httpserver.wire.body import JsonObject
from lightserve.httpserver.wire.errors import error_object
from lightserve.httpserver.wire.json_response import json_response
from lightserve.httpserver.wire.sse import EventStream, EventWriter, events_of, until_disconnect
from lightserve.io_struct import StrOut
from lightserve.output_parsing import CallArguments, CallStart, Content, Delta, Reasoning

DONE = b"data: [DONE]\n\n"


async def respond(request: Request, body: GenerationBody, generation: Generation, spec: ResponseSpec) -> Response:
    """The response of a generation, streamed or not."""
    if body.stream:
        chunks = ChunkWriter(spec, generation.log, body.wants_usage, body.wants_continuous_usage)
        return await EventStream.open(request, events_of(generation, chunks, spec.request_id))
    return json_response(await until_disconnect(request, collect_response(generation, spec)))


class ChunkWriter(EventWriter):
    """Writes one chunk for a token that has text, and more chunks for the first and the last token of a choice."""

    def __init__(self, spec: ResponseSpec, log: AccessLog, has_usage: bool, has_continuous_usage: bool) -> None:
        endpoint = spec.endpoint
        echoes = spec.echoes
        self._spec = spec
        self._log = log
        self._has_usage = has_usage
        self._has_continuous_usage = has_continuous_usage
        self._has_extras = has_continuous_usage or spec.new_logprobs is not None  # a chunk has more than text
        self._n_written = 0  # tokens, counted for continuous usage only
        self._unopened = set(range(len(echoes)))
        self._logprobs_of = [spec.logprobs_of(index // spec.n) for index in range(len(echoes))]
        self._parsers = [spec.new_parser() for _ in echoes] if spec.new_parser is not None else None
        head = b"data: " + orjson.dumps(spec.head(is_chunk=True))[:-1] + b',"choices":[{"index":'
        self._heads = [head + b"%d," % index for index in range(len(echoes))]
        self._text_heads = [head + endpoint.before_text for head in self._heads]
        usage = b',"usage":null' if has_usage else b""
        self._tail = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        self._text_tail = endpoint.after_text + self._tail

    def write(self, outs: Iterable[tuple[int, StrOut]]) -> bytes:
        events: list[bytes] = []
        for index, out in outs:
            if index in self._unopened:
                events.append(self._open(index, out))
            if self._spec.is_prompt_only:
                events.append(self._chunk(index, self._spec.endpoint.last, **finish_fields(prompt_only_end(out))))
                continue
            if self._has_continuous_usage:
                self._n_written += 1
            if self._parsers is not None:
                events += self._parsed_chunks(index, out, self._parsers[index])
            elif self._has_extras:
                events.append(self._chunk_with_extras(index, out))
            elif out.text:
                events += (self._text_heads[index], orjson.dumps(out.text), self._text_tail)
            if out.finish_reason is not None:
                finish = finish_fields(out, None if self._parsers is None else self._parsers[index])
                events.append(self._chunk(index, self._spec.endpoint.last, **finish))
        return b"".join(events)

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        usage = usage_fields(self._log, self._log.output_tokens, self._parsers)
        return _event({**self._spec.head(is_chunk=True), "choices": [], "usage": usage}) + DONE

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return _event(error_object(error, request_id)) + DONE

    def keep_alive(self) -> bytes:
        return self._spec.endpoint.keep_alive

    def _open(self, index: int, out: StrOut) -> bytes:
        """The first chunk of a choice, with the logprobs of its prompt."""
        spec, endpoint = self._spec, self._spec.endpoint
        self._unopened.discard(index)
        first = endpoint.first(spec.echoes[index])
        prompt = spec.prompt_logprobs_of(index)
        if prompt is None:
            return self._chunk(index, first) if first else b""
        first = first or endpoint.before_text + b'""' + endpoint.after_text
        echoed = prompt.echoed(out.token.prompt_logprobs)
        fields: JsonObject = {} if echoed is None else {"logprobs": echoed}
        of_prompt = prompt_logprobs_field(spec, index, out.token.prompt_logprobs)
        if endpoint.has_prompt_logprobs_in_choice:
            return self._chunk(index, first, **fields, **of_prompt)
        top_level = b"," + orjson.dumps(of_prompt)[1:-1] if of_prompt and index == 0 else b""
        return self._chunk(index, first, top_level, **fields)

    def _chunk_with_extras(self, index: int, out: StrOut) -> bytes:
        """A chunk with logprobs or continuous usage."""
        endpoint = self._spec.endpoint
        logprobs_of = self._logprobs_of[index]
        logprobs = None if logprobs_of is None else logprobs_of(out)
        if not out.text and logprobs is None:
            return b""
        text = endpoint.before_text + orjson.dumps(out.text) + endpoint.after_text
        return self._chunk(index, text, logprobs=logprobs)

    def _parsed_chunks(self, index: int, out: StrOut, parser: ChoiceParser) -> list[bytes]:
        """One chunk for every delta of a token; the first has the token's logprobs."""
        endpoint = self._spec.endpoint
        deltas = [b'"delta":' + orjson.dumps(delta_json(delta)) for delta in parser.push(out)]
        logprobs_of = self._logprobs_of[index]
        if logprobs_of is None or parser.is_hidden:
            return [self._chunk(index, delta) for delta in deltas]
        first, *rest = deltas or [endpoint.before_text + b'""' + endpoint.after_text]
        chunk = self._chunk(index, first, logprobs=logprobs_of(out))
        return [chunk, *(self._chunk(index, delta) for delta in rest)]

    def _chunk(self, index: int, text: bytes, top_level: bytes = b"", **fields: Any) -> bytes:
        """``text`` and ``fields`` belong to the choice, ``top_level`` goes next to the choices."""
        if not fields and not top_level and not self._has_continuous_usage:
            return self._heads[index] + text + self._tail
        rest = orjson.dumps({"logprobs": None, "finish_reason": None} | fields)[1:]
        return self._heads[index] + text + b"," + rest + b"]" + self._usage() + top_level + b"}\n\n"

    def _usage(self) -> bytes:
        if not self._has_usage:
            return b""
        usage = usage_fields(self._log, self._n_written, self._parsers) if self._has_continuous_usage else None
        return b',"usage":' + orjson.dumps(usage)


def delta_json(delta: Delta) -> JsonObject:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _event(value: JsonObject) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
