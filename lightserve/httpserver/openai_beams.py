"""Answers of a beam search in OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.access_log import AccessLog
from lightserve.httpserver.beam import beam_answers, not_with_beams, refuse_rules
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate_call import json_response
from lightserve.httpserver.manager import Ask
from lightserve.httpserver.openai_answer import Answer, Choice, whole
from lightserve.httpserver.openai_protocol import CompletionBody, GenerationBody
from lightserve.httpserver.openai_sampling import NAMES
from lightserve.httpserver.sse import unless_gone
from lightserve.io_struct import StrOut

FIELDS = {sampling: field for field, sampling in NAMES.items()} | {
    "bad_words_ids": "bad_words",
    "thinking": "thinking_token_budget",
}


@dataclass(frozen=True, slots=True)
class Search:
    """What to search for, and how to write what is found."""

    asks: Sequence[Ask]
    answer: Answer
    log: AccessLog


async def respond_with_beams(
    context: ServerContext, request: Request, body: GenerationBody, search: Search
) -> Response:
    num_beams = body.beams or 1
    _check(body, num_beams, search.answer)
    refuse_rules(search.asks[0].params, FIELDS)
    params = body.beam_params(num_beams, body.choices, search.asks)
    found = await unless_gone(request, beam_answers(context, search.asks, params, search.log))
    return json_response(whole(search.answer, [_choice(search.answer, rows) for rows in found], search.log))


def _check(body: GenerationBody, num_beams: int, answer: Answer) -> None:
    if body.stream:
        raise not_with_beams("stream")
    if answer.new_logprobs is not None:
        raise not_with_beams("logprobs")
    if answer.scored:
        raise not_with_beams("prompt_logprobs")
    if answer.is_scoring:
        raise InvalidRequestError("max_tokens: a beam search needs at least 1", "max_tokens")
    if isinstance(body, CompletionBody) and body.best_of not in (None, 1, num_beams):
        raise InvalidRequestError(f"best_of={body.best_of} is not num_beams={num_beams}", "best_of")


def _choice(answer: Answer, rows: Iterable[StrOut]) -> Choice:
    choice = answer.new_choice()
    for row in rows:
        choice.add(row)
    return choice
