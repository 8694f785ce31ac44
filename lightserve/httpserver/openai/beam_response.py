"""Responses of a beam search in OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.beam_search import beam_search_outputs
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.beam_fields import not_with_beam_search, refuse_excluded_params
from lightserve.httpserver.fields.generation import GenerationBody
from lightserve.httpserver.fields.sampling import PARAM_NAMES
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import json_response
from lightserve.httpserver.http.sse import until_disconnect
from lightserve.httpserver.openai.completions_request import CompletionBody
from lightserve.httpserver.openai.response import Choice, ResponseSpec, response_json
from lightserve.messages.output import StrOut

# generation parameter: the field of the body that sets it
FIELD_NAMES = {param: field for field, param in PARAM_NAMES.items()} | {
    "bad_words_ids": "bad_words",
    "thinking": "thinking_token_budget",
}


async def respond_with_beam_search(
    context: ServerContext,
    request: Request,
    body: GenerationBody,
    prompt_requests: Sequence[PromptRequest],
    spec: ResponseSpec,
    log: AccessLog,
) -> Response:
    num_beams = body.beam_width or 1
    _check(body, num_beams, spec)
    refuse_excluded_params(prompt_requests[0].params, FIELD_NAMES)
    params = body.beam_params(num_beams, body.choices, prompt_requests)
    sequences = await until_disconnect(request, beam_search_outputs(context, prompt_requests, params, log))
    return json_response(response_json(spec, [_choice(spec, outs) for outs in sequences], log))


def _check(body: GenerationBody, num_beams: int, spec: ResponseSpec) -> None:
    if body.stream:
        raise not_with_beam_search("stream")
    if spec.new_logprobs is not None:
        raise not_with_beam_search("logprobs")
    if spec.prompt_logprobs:
        raise not_with_beam_search("prompt_logprobs")
    if spec.is_prompt_only:
        raise InvalidRequestError("max_tokens: a beam search needs at least 1", "max_tokens")
    if isinstance(body, CompletionBody) and body.best_of not in (None, 1, num_beams):
        raise InvalidRequestError(f"best_of={body.best_of} is not num_beams={num_beams}", "best_of")


def _choice(spec: ResponseSpec, outs: Iterable[StrOut]) -> Choice:
    choice = spec.new_choice()
    for out in outs:
        choice.add(out)
    return choice
