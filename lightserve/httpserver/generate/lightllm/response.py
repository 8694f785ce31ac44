"""Responses and streams in LightLLM's format."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.beam_search import beam_search_outputs
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate.lightllm.request import LightllmBody, LightllmRequest, lightllm_request
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import json_response, validate
from lightserve.httpserver.http.errors import error_object
from lightserve.httpserver.http.sse import EventStream, EventWriter, GenerationEvents, until_disconnect
from lightserve.messages.output import StrOut
from lightserve.text.logprobs import finite_logprob, logprob_json, mean_logprob


async def lightllm_response(
    context: ServerContext, request: Request, log: AccessLog, value: dict[str, Any], streams: bool | None
) -> Response:
    """``streams`` None: the body says whether it is a stream."""
    body = validate(LightllmBody, value)
    context.check_fields(request, body)
    streams = bool(body.stream) if streams is None else streams
    parsed = await lightllm_request(context, body, streams)
    log.prompt_tokens = len(parsed.prompt_request.prompt_ids)
    tokenizer = context.optional_tokenizer
    special = frozenset() if tokenizer is None else tokenizer.special_ids
    if parsed.beam_params is not None:
        choices = await until_disconnect(
            request, beam_search_outputs(context, [parsed.prompt_request], parsed.beam_params, log)
        )
        return json_response(lightllm_json(parsed, choices, special))
    generation = context.manager.generate([parsed.prompt_request], log, parsed.best_of)
    if streams:
        writer = LightllmEventWriter(len(parsed.prompt_request.prompt_ids), special)
        return await EventStream.open(request, GenerationEvents(generation, writer, log.request_id))
    choices = await until_disconnect(request, generation.collect())
    return json_response(lightllm_json(parsed, choices, special))


def lightllm_json(parsed: LightllmRequest, choices: list[list[StrOut]], special: Collection[int]) -> dict[str, Any]:
    """The response. A field with a value for each choice is a list where n > 1; the texts are always a list."""
    if parsed.n < parsed.best_of:
        choices = sorted(choices, key=mean_logprob, reverse=True)[: parsed.n]
    prompt_tokens = len(parsed.prompt_request.prompt_ids)
    counts = [len(outs) for outs in choices]
    reasons = [_finish_reason(outs[-1]) for outs in choices]
    response: dict[str, Any] = {
        "generated_text": ["".join([out.text for out in outs]) for outs in choices],
        "count_output_tokens": counts if parsed.n > 1 else counts[0],
        "finish_reason": reasons if parsed.n > 1 else reasons[0],
        "prompt_tokens": prompt_tokens,
    }
    if parsed.return_details:
        tokens = [_tokens(outs, prompt_tokens, special) for outs in choices]
        response["tokens"] = tokens if parsed.n > 1 else tokens[0]
    return response


def _tokens(outs: Sequence[StrOut], prompt_tokens: int, special: Collection[int]) -> list[dict[str, Any]]:
    total, tokens = 0.0, []
    for count, out in enumerate(outs, start=1):
        total += finite_logprob(out.token.logprob) or 0.0
        tokens.append(
            {
                "id": out.token.id,
                "text": out.text,
                "logprob": finite_logprob(out.token.logprob),
                "cumlogprob": total / count,  # LightLLM's name for the mean
                "special": out.token.id in special,
                "count_output_tokens": count,
                "prompt_tokens": prompt_tokens,
                "mtp_accepted_token_num": 0,
            }
        )
    return tokens


class LightllmEventWriter(EventWriter):
    """Writes one event per token: ``data:`` + compact JSON + blank line."""

    def __init__(self, prompt_tokens: int, special: Collection[int]) -> None:
        self.count = 0
        self._special = special
        self._rest = b',"prompt_tokens":%d},"generated_text":null,"finished":' % prompt_tokens
        self._more = self._rest + b'false,"finish_reason":null,"details":null}\n\n'

    def write(self, batch: list[tuple[int, StrOut]]) -> bytes:
        return b"".join([self.line(out) for _, out in batch])

    def end(self) -> bytes:
        return b""

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"data:%b\n\n" % orjson.dumps(error_object(error, request_id))

    def keep_alive(self) -> bytes:
        return b""  # LightLLM's clients count every line that is not empty as a token

    def line(self, out: StrOut) -> bytes:
        self.count += 1
        return b'data:{"token":{"id":%d,"text":%b,"logprob":%b,"special":%b,"count_output_tokens":%d%b' % (
            out.token.id,
            orjson.dumps(out.text),
            logprob_json(out.token.logprob),
            b"true" if out.token.id in self._special else b"false",
            self.count,
            self._more if out.finish_reason is None else self._end(out),
        )

    def _end(self, out: StrOut) -> bytes:
        return self._rest + b'true,"finish_reason":%b,"details":null}\n\n' % orjson.dumps(_finish_reason(out))


def _finish_reason(out: StrOut) -> str | None:
    return None if out.finish_reason is None else out.finish_reason.value
