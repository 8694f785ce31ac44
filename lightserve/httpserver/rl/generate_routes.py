"""POST /inference/v1/generate, vLLM's endpoint for token ids: tokens in, tokens out."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.generation import GenerationBody, RequestId, validate_supported
from lightserve.httpserver.fields.grammar import requested_grammar
from lightserve.httpserver.fields.sampling import build_prompt_requests, check_choices
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import Body, JsonObject, json_response, openapi_body
from lightserve.httpserver.http.errors import error_object
from lightserve.httpserver.http.sse import (
    OPENAPI_STREAM,
    EventStream,
    EventWriter,
    GenerationEvents,
    Outs,
    until_disconnect,
)
from lightserve.httpserver.openai.logprobs import PromptLogprobsWriter
from lightserve.httpserver.rl.candidates import IDS, candidate_scores, take_candidates, with_candidates
from lightserve.httpserver.routed_experts import RoutedExperts, experts_shape
from lightserve.httpserver.weight_versions import WeightVersions
from lightserve.messages.control import RoutedExpertsShape
from lightserve.messages.output import StrOut
from lightserve.text.logprobs import finite_logprob

DEFAULT_NEW_TOKENS = 16
ID_PREFIX = "generate-tokens-"
DONE = b"data: [DONE]\n\n"


class TokensBody(Body):
    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    sampling_params: dict[str, Any] = Field(description="max_tokens, temperature, logprobs, n and others, as vLLM's")
    model: str | None = None
    stream: bool | None = None
    return_token_ids: bool | None = Field(None, description="the prompt's too")
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    return_routed_experts: bool | None = Field(None, description="default: if the server keeps them: see docs/rl.md")
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = Field(None, description="from this token on")
    output_mode: Literal["tokens", "text"] | None = Field(None, description="text: with the text of each choice")


@dataclass(slots=True)
class TokensRequest:
    prompt_request: PromptRequest
    n: int
    logprobs: int | None  # alternatives to each token; None: no logprobs
    prompt_logprobs: PromptLogprobsWriter | None
    experts: RoutedExpertsShape | None  # None: the response does not say which were chosen
    body: TokensBody


def add_generate(router: APIRouter, context: ServerContext) -> None:
    @router.post("/inference/v1/generate", responses=OPENAPI_STREAM, openapi_extra=openapi_body(TokensBody))
    async def generate_tokens(request: Request) -> Response:
        """Continue token ids. A request that is aborted has the finish reason abort, and its tokens."""
        body = await context.read_body(request, TokensBody)
        context.check_model(body.model)
        log = context.log(request, body.request_id)
        log.response_id = ID_PREFIX + log.request_id
        parsed = await _parse(context, body)
        log.prompt_tokens = len(parsed.prompt_request.prompt_ids)
        generation = context.manager.generate([parsed.prompt_request], log, parsed.n)
        generation.returns_aborted = True
        writer = TokensWriter(parsed, log, generation.versions)
        if body.stream:
            return await EventStream.open(request, GenerationEvents(generation, writer, log.request_id))
        choices = await until_disconnect(request, generation.collect())
        outs = [(index, out) for index, of_choice in enumerate(choices) for out in of_choice]
        return await asyncio.to_thread(writer.whole, choices) if writer.is_slow(outs) else writer.whole(choices)


async def _parse(context: ServerContext, body: TokensBody) -> TokensRequest:
    context.manager.check_ids("token_ids", body.token_ids)
    fields = {"priority": body.priority, "cache_salt": body.cache_salt} | body.sampling_params
    candidates = take_candidates(context, fields, len(body.token_ids))
    if candidates is not None and body.stream:
        raise InvalidRequestError(f"sampling_params.{IDS}: streams do not return them", IDS)
    logprobs = fields.pop("logprobs", None)
    if logprobs is not None and (not isinstance(logprobs, int) or isinstance(logprobs, bool) or logprobs < -1):
        raise InvalidRequestError(f"sampling_params.logprobs: must be an integer from -1 on, found {logprobs!r}")
    sampling = validate_supported(GenerationBody, {**fields, "model": body.model})
    sampling.limit_logprobs(context)
    if sampling.is_prompt_only:
        raise InvalidRequestError("sampling_params.max_tokens: must be at least 1", "max_tokens")
    check_choices(context, 1, sampling.choices)
    grammar = await requested_grammar(context, sampling)
    k = context.top_logprobs("logprobs", logprobs)
    [request] = build_prompt_requests(context, sampling, [body.token_ids], k, DEFAULT_NEW_TOKENS, grammar)
    wanted = sampling.prompt_logprobs
    prompt = None
    if wanted is not None:
        prompt = PromptLogprobsWriter(context.tokenizer, request.prompt_ids, field_k=wanted)
    experts = context.manager.limits.routed_experts if grammar is None else None
    if body.return_routed_experts is not None:
        experts = experts_shape(context, request.params) if body.return_routed_experts else None
    request = replace(request, params=request.params.replace(routed_experts=experts is not None))
    if candidates is not None:
        request = replace(request, params=with_candidates(request.params, candidates))
    return TokensRequest(request, sampling.choices, k, prompt, experts, body)


class TokensWriter(EventWriter):
    def __init__(self, parsed: TokensRequest, log: AccessLog, versions: WeightVersions) -> None:
        self._versions = versions
        self._num_tokens: Counter[int] = Counter()  # of each choice
        self._experts: defaultdict[int, RoutedExperts] = defaultdict(RoutedExperts)
        self._parsed = parsed
        self._log = log
        self._id = {"request_id": ID_PREFIX + log.request_id}

    def write(self, outs: Outs) -> bytes:
        """One event for the new tokens of a choice."""
        by_choice: dict[int, list[StrOut]] = {}
        for index, out in outs:
            by_choice.setdefault(index, []).append(out)
        chunks = [
            self._id | {"choices": [self._choice(index, choice_outs)]} for index, choice_outs in by_choice.items()
        ]
        return b"".join(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks)

    def end(self) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(self._id | {"choices": [], "usage": self._usage()}) + DONE

    def error(self, error: LightserveError, request_id: str) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(error_object(error, request_id)) + DONE

    def is_slow(self, outs: Outs) -> bool:
        """Experts that come now are not written before the end."""
        if self._parsed.experts is None or all(out.finish_reason is None for _, out in outs):
            return False
        coming = RoutedExperts()
        for _, out in outs:
            coming.add(out.token)
        return coming.are_many or any(experts.are_many for experts in self._experts.values())

    def whole(self, choices: list[list[StrOut]]) -> Response:
        parsed = self._parsed
        prompt = parsed.prompt_logprobs
        packed = choices[0][0].token.prompt_logprobs
        return json_response(
            self._id
            | {
                "choices": [self._choice(index, outs) for index, outs in enumerate(choices)],
                "usage": self._usage(),
                "prompt_token_ids": parsed.prompt_request.prompt_ids if parsed.body.return_token_ids else None,
                "prompt_logprobs": None if prompt is None else prompt.field(packed),
                "prompt_token_id_logprobs": candidate_scores(parsed.prompt_request.params, packed),
                "output_mode": parsed.body.output_mode or "tokens",
            }
        )

    def _choice(self, index: int, outs: list[StrOut]) -> JsonObject:
        tokens = [out for out in outs if out.has_token]
        end = outs[-1]
        self._num_tokens[index] += len(tokens)
        for out in tokens:
            self._experts[index].add(out.token)
        choice: JsonObject = {
            "index": index,
            "token_ids": [out.token.id for out in tokens],
            "finish_reason": None if end.finish_reason is None else end.finish_reason.value,
            "stop_reason": end.stop_reason,
            "logprobs": None if self._parsed.logprobs is None else {"content": [_entry(out) for out in tokens]},
        }
        if end.finish_reason is not None:
            choice["weight_versions"] = self._versions.json(index, self._num_tokens[index])
            if self._parsed.experts is not None:
                choice["routed_experts"] = self._routed_experts(index, self._parsed.experts)
        if self._parsed.body.output_mode == "text":
            choice["text"] = "".join(out.text for out in outs)
        return choice

    def _routed_experts(self, index: int, shape: RoutedExpertsShape) -> orjson.Fragment:
        start = self._parsed.body.routed_experts_prompt_start or 0
        tokens = len(self._parsed.prompt_request.prompt_ids) + self._num_tokens[index] - 1
        return self._experts[index].for_vllm(shape, start, tokens)

    def _usage(self) -> JsonObject:
        log = self._log
        total = log.prompt_tokens + log.output_tokens
        return {"prompt_tokens": log.prompt_tokens, "completion_tokens": log.output_tokens, "total_tokens": total}


def _entry(out: StrOut) -> JsonObject:
    """A rank is known only among the alternatives that were asked for."""
    top = list(_ranked(out.token.top_logprobs or ()))
    rank = next((entry["rank"] for entry in top if entry["token_id"] == out.token.id), None)
    logprob = finite_logprob(out.token.logprob)
    return {"token_id": out.token.id, "logprob": logprob, "rank": rank, "top_logprobs": top}


def _ranked(top: Iterable[tuple[int, float]]) -> Iterable[JsonObject]:
    for rank, (token_id, logprob) in enumerate(top, start=1):
        yield {"token_id": token_id, "logprob": finite_logprob(logprob), "rank": rank}
