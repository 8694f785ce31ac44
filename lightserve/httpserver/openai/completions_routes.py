"""POST /v1/completions"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.beam_fields import not_with_beam_search
from lightserve.httpserver.fields.generation import validate_supported
from lightserve.httpserver.fields.grammar import requested_grammar
from lightserve.httpserver.fields.sampling import build_prompt_requests, check_choices
from lightserve.httpserver.fields.token_healing import heal, healing_error
from lightserve.httpserver.http.body import openapi_body
from lightserve.httpserver.http.sse import OPENAPI_STREAM
from lightserve.httpserver.openai.beam_response import respond_with_beam_search
from lightserve.httpserver.openai.completions_request import CompletionBody, Prompt
from lightserve.httpserver.openai.logprobs import CompletionLogprobs, PromptLogprobsWriter
from lightserve.httpserver.openai.response import EndpointFormat, ResponseSpec
from lightserve.httpserver.openai.stream import respond

DEFAULT_NEW_TOKENS = 16  # OpenAI's

# A comment that LightLLM's benchmark client survives: it drops six characters of each HTTP chunk, parses the rest as
# JSON, and skips a choice without text.
KEEP_ALIVE = b':     {"choices":[{"text":""}]}\n\n'

COMPLETION = EndpointFormat(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_object_name="text_completion",
    text_fields=lambda text: {"text": text},
    first=lambda echo: b'"text":' + orjson.dumps(echo) if echo else b"",
    before_text=b'"text":',
    after_text=b"",
    last=b'"text":""',
    has_prompt_fields_in_choice=True,
    keep_alive=KEEP_ALIVE,
)


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", responses=OPENAPI_STREAM, openapi_extra=openapi_body(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await context.read_body(request, CompletionBody, validate_supported)
        context.check_model(body.model)
        body.limit_logprobs(context)
        check_choices(context, len(body.prompt), body.beam_width or body.candidates)
        log = context.log(request, body.request_id or body.rid)

        prompts = [await _prompt_ids(context, body, prompt) for prompt in body.prompt]
        grammar = await requested_grammar(context, body)
        prompt_requests = build_prompt_requests(
            context, body, prompts, _engine_logprobs(body), DEFAULT_NEW_TOKENS, grammar
        )
        echoes = [_echo(context, body, *pair) for pair in zip(body.prompt, prompt_requests, strict=True)]
        shown_ids = [prompt_request.prompt_ids for prompt_request in prompt_requests] if body.return_token_ids else ()
        if body.token_healing:
            _check_healing(body)
            prompt_requests = [await heal(context, prompt_request) for prompt_request in prompt_requests]
        log.prompt_tokens = sum(len(prompt_request.prompt_ids) for prompt_request in prompt_requests)
        log.counts_output = not body.is_prompt_only
        spec = ResponseSpec(
            endpoint=COMPLETION,
            request_id=log.request_id,
            model=context.shown_model(body.model),
            n=body.choices,
            echoes=[echo for echo in echoes for _ in range(body.choices)],
            hidden_chars=[prompt_request.params.text.hidden_chars for prompt_request in prompt_requests],
            new_logprobs=_new_logprobs(context, body),
            prompt_logprobs=_prompt_logprobs(context, body, prompt_requests, echoes),
            prompt_token_ids=shown_ids,
            is_prompt_only=body.is_prompt_only,
            returns_aborted=context.config.enable_rl,
        )
        if body.beam_width is not None:
            return await respond_with_beam_search(context, request, body, prompt_requests, spec, log)
        return await respond(request, body, context.manager.generate(prompt_requests, log, body.candidates), spec)

    return router


async def _prompt_ids(context: ServerContext, body: CompletionBody, prompt: Prompt) -> list[int]:
    if isinstance(prompt, list):
        context.manager.check_ids("prompt", prompt)
        return prompt
    await asyncio.sleep(0)  # a hundred prompts take a while: the event loop serves other requests in between
    return await context.encode(prompt, body.add_special_tokens is not False)


def _echo(context: ServerContext, body: CompletionBody, prompt: Prompt, prompt_request: PromptRequest) -> str:
    """The prompt as text, after truncation, with its special tokens."""
    if not body.echo:
        return ""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return context.tokenizer.decode(prompt_request.prompt_ids, skip_special_tokens=False)


def _check_healing(body: CompletionBody) -> None:
    if not all(isinstance(prompt, str) for prompt in body.prompt):
        raise healing_error("for a prompt that is a text")
    if body.is_prompt_only:
        raise healing_error("with max_tokens of at least 1")
    if body.beam_width is not None:
        raise not_with_beam_search("token_healing")


def _engine_logprobs(body: CompletionBody) -> int | None:
    """The logprobs to request from the engine; best_of needs them to compare candidates."""
    return 0 if body.logprobs is None and body.candidates > body.choices else body.logprobs


def _prompt_logprobs(
    context: ServerContext, body: CompletionBody, prompt_requests: Sequence[PromptRequest], echoes: Sequence[str]
) -> list[PromptLogprobsWriter]:
    if body.prompt_top_logprobs is None:
        return []
    tokenizer, field_k, echo_k = context.tokenizer, body.prompt_logprobs, body.echo_top_logprobs
    pairs = zip(prompt_requests, echoes, strict=True)
    shows_ids = bool(body.return_tokens_as_token_ids)
    return [
        PromptLogprobsWriter(tokenizer, prompt_request.prompt_ids, echo, field_k, echo_k, shows_ids)
        for prompt_request, echo in pairs
    ]


def _new_logprobs(context: ServerContext, body: CompletionBody) -> partial[CompletionLogprobs] | None:
    if body.logprobs is None:
        return None
    skips_special, shows_ids = body.skip_special_tokens is not False, bool(body.return_tokens_as_token_ids)
    return partial(CompletionLogprobs, context.tokenizer, body.logprobs, skips_special, shows_ids=shows_ids)
