"""Responses and streams in TGI's format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import ClientDisconnectedError, LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate.tgi.errors import tgi_error_object, tgi_error_response
from lightserve.httpserver.generate.tgi.request import TgiBody, TgiRequest, tgi_request
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import json_response, validate
from lightserve.httpserver.http.sse import EventStream, EventWriter, GenerationEvents, until_disconnect
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.step import PromptLogprobs
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from lightserve.text.logprobs import finite_logprob, logprob_json, mean_logprob, unpack_prompt_logprobs

COMPUTE_TYPE = "lightserve"  # HTTP processes do not know the device


async def tgi_response(
    context: ServerContext, request: Request, log: AccessLog, value: dict[str, Any], streams: bool | None
) -> Response:
    """``streams`` None: the body says whether it is a stream."""
    try:
        return await _response(context, request, log, value, streams)
    except ClientDisconnectedError:
        raise
    except LightserveError as error:
        return tgi_error_response(error, request)


async def _response(
    context: ServerContext, request: Request, log: AccessLog, value: dict[str, Any], streams: bool | None
) -> Response:
    body = validate(TgiBody, value)
    context.check_fields(request, body)
    is_stream = bool(body.stream) if streams is None else streams
    parsed = await tgi_request(context, body, is_stream)
    log.prompt_tokens = len(parsed.prompt_request.prompt_ids)
    validated_s = time.monotonic()
    headers = {"x-compute-type": COMPUTE_TYPE, "x-compute-characters": str(len(body.inputs))}
    generation = context.manager.generate([parsed.prompt_request], log, parsed.best_of)
    if is_stream:
        events = GenerationEvents(generation, TgiEventWriter(parsed, context.tokenizer), log.request_id)
        return await EventStream.open(request, events, headers)
    choices = await until_disconnect(request, generation.collect())
    best = max(range(parsed.best_of), key=lambda i: mean_logprob(choices[i]))
    response = tgi_json(parsed, choices, best, context.tokenizer)
    headers |= _timings(log, choices[best], validated_s)
    return json_response([response] if streams is None else response, headers)  # POST / returns a list


def tgi_json(parsed: TgiRequest, choices: list[list[StrOut]], best: int, tokenizer: Tokenizer) -> dict[str, Any]:
    text = parsed.before + _text(choices[best])
    if not parsed.details:
        return {"generated_text": text}
    details = _details(parsed, choices[best], best, tokenizer)
    if parsed.best_of > 1:
        details["best_of_sequences"] = [
            {"generated_text": parsed.before + _text(outs), **_details(parsed, outs, i, tokenizer)}
            for i, outs in enumerate(choices)
            if i != best
        ]
    return {"generated_text": text, "details": details}


def _text(outs: Sequence[StrOut]) -> str:
    return "".join([out.text for out in outs])


def _details(parsed: TgiRequest, outs: Sequence[StrOut], choice: int, tokenizer: Tokenizer) -> dict[str, Any]:
    has_prefill = parsed.prompt_request.params.sampling.prompt_logprobs is not None
    details: dict[str, Any] = {
        "finish_reason": finish_reason(outs[-1]),
        "generated_tokens": len(outs),
        "seed": None if parsed.seed is None else (parsed.seed + choice) % 2**64,  # as the manager assigns them
        "prefill": prefill(parsed.prompt_request.prompt_ids, outs[0].token.prompt_logprobs, tokenizer)
        if has_prefill
        else [],
        "tokens": [_token(out.token.id, out.text, out.token.logprob, is_special(out, tokenizer)) for out in outs],
    }
    if parsed.top_n_tokens:
        details["top_tokens"] = [_top_tokens(out, tokenizer) for out in outs]
    return details


def prefill(prompt_ids: Sequence[int], packed: PromptLogprobs | None, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokens of a prompt with their logprobs."""
    return [
        {
            "id": token.token_id,
            "text": tokenizer.decoder.token_text(token.token_id),
            "logprob": finite_logprob(token.logprob),
        }
        for token in unpack_prompt_logprobs(prompt_ids, packed)
    ]


def _token(token_id: int, text: str, logprob: float | None, special: bool) -> dict[str, Any]:
    return {"id": token_id, "text": text, "logprob": finite_logprob(logprob), "special": special}


def _top_tokens(out: StrOut, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    special = tokenizer.special_ids
    return [
        _token(token_id, tokenizer.decode([token_id], skip_special_tokens=False), logprob, token_id in special)
        for token_id, logprob in out.token.top_logprobs or ()
    ]


def is_special(out: StrOut, tokenizer: Tokenizer) -> bool:
    """Clients drop the text of special tokens, so one that completes earlier text is not reported as special."""
    return out.token.id in tokenizer.special_ids and not out.text


def finish_reason(out: StrOut) -> str:
    if out.finish_reason is not FinishReason.STOP:
        return "length"
    return "eos_token" if out.stop_reason is None else "stop_sequence"


def _timings(log: AccessLog, outs: Sequence[StrOut], validated_s: float) -> dict[str, str]:
    total_s = time.monotonic() - log.arrived_s
    validation_s = validated_s - log.arrived_s
    queue_s = 0.0 if outs[0].admission is None else outs[0].admission.queue_s
    inference_s = max(total_s - validation_s - queue_s, 0.0)
    in_ms = {
        "x-total-time": total_s,
        "x-validation-time": validation_s,
        "x-queue-time": queue_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / len(outs),
    }
    return {
        "x-compute-time": f"{total_s:.6f}",
        **{name: str(int(seconds * 1000)) for name, seconds in in_ms.items()},
        "x-prompt-tokens": str(log.prompt_tokens),
        "x-generated-tokens": str(len(outs)),
    }


class TgiEventWriter(EventWriter):
    """Writes one event per token; the last one has the whole text."""

    def __init__(self, parsed: TgiRequest, tokenizer: Tokenizer) -> None:
        self.count = 0
        self._request = parsed
        self._top_n_tokens = parsed.top_n_tokens
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._texts = [parsed.before]

    def write(self, batch: list[tuple[int, StrOut]]) -> bytes:
        return b"".join([self.line(out) for _, out in batch])

    def end(self) -> bytes:
        return b""

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(tgi_error_object(error, request_id)[1])

    def line(self, out: StrOut) -> bytes:
        self.count += 1
        self._texts.append(out.text)
        has_more = out.finish_reason is not None or self._top_n_tokens
        return b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},%b' % (
            self.count,
            out.token.id,
            orjson.dumps(out.text),
            logprob_json(out.token.logprob),
            b"true" if out.token.id in self._special and not out.text else b"false",
            self._rest(out) if has_more else b'"generated_text":null,"details":null}\n\n',
        )

    def _rest(self, out: StrOut) -> bytes:
        rest: dict[str, Any] = {"generated_text": None, "details": None}
        if self._top_n_tokens:
            rest = {"top_tokens": _top_tokens(out, self._tokenizer), **rest}
        if out.finish_reason is not None:
            rest["generated_text"] = "".join(self._texts)
            rest["details"] = self._details(out) if self._request.details else None
        return orjson.dumps(rest)[1:] + b"\n\n"

    def _details(self, out: StrOut) -> dict[str, Any]:
        return {
            "finish_reason": finish_reason(out),
            "generated_tokens": self.count,
            "seed": self._request.seed,
            "input_length": len(self._request.prompt_request.prompt_ids),
        }
