"""Answers and streams in TGI's schema."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

from lightserve.errors import ClientDisconnectedError, LightserveError
from lightserve.httpserver.body import check
from lightserve.httpserver.generate_call import Call, finite, json_response, logprob_json, mean_logprob, text_of
from lightserve.httpserver.scored_prompt import ScoredPrompt
from lightserve.httpserver.sse import EventStream, events_of, unless_gone
from lightserve.httpserver.tgi_errors import tgi_error_object, tgi_error_response
from lightserve.httpserver.tgi_request import TgiAsk, TgiBody, tgi_ask
from lightserve.io_struct import FinishReason, StrOut
from lightserve.model_files.tokenizer import Tokenizer

COMPUTE_TYPE = "lightserve"  # the HTTP processes do not know the device


async def tgi_answer(call: Call, value: dict[str, Any]) -> Response:
    try:
        return await _answer(call, value)
    except ClientDisconnectedError:
        raise
    except LightserveError as error:
        return tgi_error_response(error, call.log.request_id)


async def _answer(call: Call, value: dict[str, Any]) -> Response:
    body = check(TgiBody, value)
    streams = bool(body.stream) if call.streams is None else call.streams
    asked = await tgi_ask(call.context, body, streams)
    call.log.prompt_tokens = len(asked.ask.prompt_ids)
    validated_s = time.monotonic()
    headers = {"x-compute-type": COMPUTE_TYPE, "x-compute-characters": str(len(body.inputs))}
    if streams:
        events = events_of(call.generate(asked.ask), TgiLines(asked, call.context.tokenizer))
        return await EventStream.open(call.request, events, headers)
    choices = await unless_gone(call.request, call.rows(asked.ask, asked.best_of))
    best = max(range(asked.best_of), key=lambda i: mean_logprob(choices[i]))
    answer = tgi_whole(asked, choices, best, call.context.tokenizer)
    headers |= _timings(call, choices[best], validated_s)
    return json_response([answer] if call.streams is None else answer, headers)  # POST / answers with a list


def tgi_whole(asked: TgiAsk, choices: list[list[StrOut]], best: int, tokenizer: Tokenizer) -> dict[str, Any]:
    text = asked.before + text_of(choices[best])
    if not asked.details:
        return {"generated_text": text}
    details = _details(asked, choices[best], best, tokenizer)
    if asked.best_of > 1:
        details["best_of_sequences"] = [
            {"generated_text": asked.before + text_of(rows), **_details(asked, rows, i, tokenizer)}
            for i, rows in enumerate(choices)
            if i != best
        ]
    return {"generated_text": text, "details": details}


def _details(asked: TgiAsk, rows: Sequence[StrOut], choice: int, tokenizer: Tokenizer) -> dict[str, Any]:
    details: dict[str, Any] = {
        "finish_reason": finish_reason(rows[-1]),
        "generated_tokens": len(rows),
        "seed": None if asked.seed is None else (asked.seed + choice) % 2**64,  # as the manager gives them out
        "prefill": _prefill(asked, rows[0], tokenizer),
        "tokens": [_token(row.token.id, row.text, row.token.logprob, is_special(row, tokenizer)) for row in rows],
    }
    if asked.top_n_tokens:
        details["top_tokens"] = [_top_tokens(row, tokenizer) for row in rows]
    return details


def _prefill(asked: TgiAsk, first: StrOut, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if asked.ask.params.sampling.prompt_logprobs is None:
        return []
    return ScoredPrompt(tokenizer, asked.ask.prompt_ids).prefill(first.token.prompt_logprobs)


def _token(token_id: int, text: str, logprob: float | None, special: bool) -> dict[str, Any]:
    return {"id": token_id, "text": text, "logprob": finite(logprob), "special": special}


def _top_tokens(row: StrOut, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    special = tokenizer.special_ids
    return [
        _token(token_id, tokenizer.decode([token_id], skip_special_tokens=False), logprob, token_id in special)
        for token_id, logprob in row.token.top_logprobs or ()
    ]


def is_special(row: StrOut, tokenizer: Tokenizer) -> bool:
    """Clients leave out the text of special tokens, so one that brings held-back text with it does not count as one."""
    return row.token.id in tokenizer.special_ids and not row.text


def finish_reason(row: StrOut) -> str:
    if row.finish_reason is not FinishReason.STOP:
        return "length"
    return "eos_token" if row.stop_reason is None else "stop_sequence"


def _timings(call: Call, rows: Sequence[StrOut], validated_s: float) -> dict[str, str]:
    total_s = time.monotonic() - call.log.arrived_s
    validation_s = validated_s - call.log.arrived_s
    queue_s = 0.0 if rows[0].admission is None else rows[0].admission.queue_s
    inference_s = max(total_s - validation_s - queue_s, 0.0)
    in_ms = {
        "x-total-time": total_s,
        "x-validation-time": validation_s,
        "x-queue-time": queue_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / len(rows),
    }
    return {
        "x-compute-time": f"{total_s:.6f}",
        **{name: str(int(seconds * 1000)) for name, seconds in in_ms.items()},
        "x-prompt-tokens": str(call.log.prompt_tokens),
        "x-generated-tokens": str(len(rows)),
    }


class TgiLines:
    """The stream's events, one a token; the last one has the whole text."""

    def __init__(self, asked: TgiAsk, tokenizer: Tokenizer) -> None:
        self.count = 0
        self._asked = asked
        self._top_n_tokens = asked.top_n_tokens
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._texts = [asked.before]

    def write(self, news: list[tuple[int, StrOut]]) -> bytes:
        return b"".join([self.line(out) for _, out in news])

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
            rest["details"] = self._details(out) if self._asked.details else None
        return orjson.dumps(rest)[1:] + b"\n\n"

    def _details(self, out: StrOut) -> dict[str, Any]:
        return {
            "finish_reason": finish_reason(out),
            "generated_tokens": self.count,
            "seed": self._asked.seed,
            "input_length": len(self._asked.ask.prompt_ids),
        }
