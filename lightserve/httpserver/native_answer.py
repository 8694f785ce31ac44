"""Answers and streams in LightLLM's own schema."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.body import check
from lightserve.httpserver.error_handlers import error_object
from lightserve.httpserver.generate_call import Call, finite, json_response, logprob_json, mean_logprob, text_of
from lightserve.httpserver.native_request import NativeAsk, NativeBody, native_ask
from lightserve.httpserver.sse import EventStream, events_of, unless_gone
from lightserve.io_struct import StrOut


async def native_answer(call: Call, value: dict[str, Any]) -> Response:
    body = check(NativeBody, value)
    streams = bool(body.stream) if call.streams is None else call.streams
    asked = await native_ask(call.context, body, streams)
    call.log.prompt_tokens = len(asked.ask.prompt_ids)
    if streams:
        lines = NativeLines(len(asked.ask.prompt_ids), special_ids(call))
        return await EventStream.open(call.request, events_of(call.generate(asked.ask), lines))
    answers = call.rows(asked.ask, asked.best_of) if asked.beams is None else call.beams(asked.ask, asked.beams)
    rows = await unless_gone(call.request, answers)
    return json_response(native_whole(asked, rows, special_ids(call)))


def special_ids(call: Call) -> Collection[int]:
    tokenizer = call.context.maybe_tokenizer
    return () if tokenizer is None else tokenizer.special_ids


def native_whole(asked: NativeAsk, choices: list[list[StrOut]], special: Collection[int]) -> dict[str, Any]:
    """The answer; what is one a choice is a list where n > 1, and the texts always are."""
    if asked.n < asked.best_of:
        choices = sorted(choices, key=mean_logprob, reverse=True)[: asked.n]
    prompt_tokens = len(asked.ask.prompt_ids)
    counts = [len(rows) for rows in choices]
    reasons = [_finish_reason(rows[-1]) for rows in choices]
    answer: dict[str, Any] = {
        "generated_text": [text_of(rows) for rows in choices],
        "count_output_tokens": counts if asked.n > 1 else counts[0],
        "finish_reason": reasons if asked.n > 1 else reasons[0],
        "prompt_tokens": prompt_tokens,
    }
    if asked.return_details:
        tokens = [_tokens(rows, prompt_tokens, special) for rows in choices]
        answer["tokens"] = tokens if asked.n > 1 else tokens[0]
    return answer


def _tokens(rows: Sequence[StrOut], prompt_tokens: int, special: Collection[int]) -> list[dict[str, Any]]:
    total, tokens = 0.0, []
    for count, row in enumerate(rows, start=1):
        total += finite(row.token.logprob) or 0.0
        tokens.append(
            {
                "id": row.token.id,
                "text": row.text,
                "logprob": finite(row.token.logprob),
                "cumlogprob": total / count,  # a mean, in spite of its name, as LightLLM has it
                "special": row.token.id in special,
                "count_output_tokens": count,
                "prompt_tokens": prompt_tokens,
                "mtp_accepted_token_num": 0,
            }
        )
    return tokens


class NativeLines:
    """The stream's lines, one a token: ``data:`` + compact JSON + blank line."""

    def __init__(self, prompt_tokens: int, special: Collection[int]) -> None:
        self.count = 0
        self._special = special
        self._rest = b',"prompt_tokens":%d},"generated_text":null,"finished":' % prompt_tokens
        self._more = self._rest + b'false,"finish_reason":null,"details":null}\n\n'

    def write(self, news: list[tuple[int, StrOut]]) -> bytes:
        return b"".join([self.line(out) for _, out in news])

    def end(self) -> bytes:
        return b""

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"data:%b\n\n" % orjson.dumps(error_object(error, request_id))

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


def _finish_reason(row: StrOut) -> str | None:
    return None if row.finish_reason is None else row.finish_reason.value
