"""POST /v1/completions"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.beam import not_with_beams
from lightserve.httpserver.body import documented
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.grammar_fields import grammar_of
from lightserve.httpserver.manager import Ask
from lightserve.httpserver.openai_answer import Answer, Form, name_request, respond
from lightserve.httpserver.openai_beams import Search, respond_with_beams
from lightserve.httpserver.openai_logprobs import CompletionLogprobs
from lightserve.httpserver.openai_protocol import CompletionBody, Prompt, checked
from lightserve.httpserver.openai_sampling import asks_of, check_choices
from lightserve.httpserver.scored_prompt import ScoredPrompt
from lightserve.httpserver.sse import DOCUMENTED
from lightserve.httpserver.token_healing import heal, not_healed

DEFAULT_NEW_TOKENS = 16  # OpenAI's

COMPLETION = Form(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    whole_text=lambda text: {"text": text},
    first=lambda echo: b'"text":' + orjson.dumps(echo) if echo else b"",
    before_text=b'"text":',
    after_text=b"",
    last=b'"text":""',
    scores_in_choice=True,
)


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", responses=DOCUMENTED, openapi_extra=documented(CompletionBody))
    async def completions(request: Request) -> Response:
        body = checked(CompletionBody, await context.read(request))
        context.check_model(body.model)
        check_choices(context, len(body.prompt), body.beams or body.candidates)
        name_request(request, body)
        log = context.log(request)

        prompts = [await _ids(context, body, prompt) for prompt in body.prompt]
        grammar = await grammar_of(context, body)
        asks = asks_of(context, body, prompts, _logprobs_to_ask(body), DEFAULT_NEW_TOKENS, grammar)
        echoes = [_echo(context, body, prompt, ask) for prompt, ask in zip(body.prompt, asks, strict=True)]
        if body.token_healing:
            _check_healing(body)
            asks = [await heal(context, ask) for ask in asks]
        log.prompt_tokens = sum(len(ask.prompt_ids) for ask in asks)
        log.shows_output = not body.is_scoring
        answer = Answer(
            form=COMPLETION,
            request_id=log.request_id,
            model=context.model_name,
            n=body.choices,
            echoes=[echo for echo in echoes for _ in range(body.choices)],
            hidden_chars=[ask.params.text.hidden_chars for ask in asks],
            new_logprobs=_new_logprobs(context, body),
            scored=_scored(context, body, asks, echoes),
            is_scoring=body.is_scoring,
        )
        if body.beams is not None:
            return await respond_with_beams(context, request, body, Search(asks, answer, log))
        return await respond(request, body, context.manager.generate(asks, log, body.candidates), answer)

    return router


async def _ids(context: ServerContext, body: CompletionBody, prompt: Prompt) -> list[int]:
    if isinstance(prompt, list):
        context.manager.check_ids("prompt", prompt)
        return prompt
    await asyncio.sleep(0)  # a hundred prompts take a while: let other requests have their turn
    return await context.encode(prompt, body.add_special_tokens is not False)


def _echo(context: ServerContext, body: CompletionBody, prompt: Prompt, ask: Ask) -> str:
    """The prompt as text, without what truncation took."""
    if not body.echo:
        return ""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return context.tokenizer.decode(ask.prompt_ids, body.skip_special_tokens is not False)


def _check_healing(body: CompletionBody) -> None:
    if not all(isinstance(prompt, str) for prompt in body.prompt):
        raise not_healed("of a prompt that is a text")
    if body.is_scoring:
        raise not_healed("where something is generated")
    if body.beams is not None:
        raise not_with_beams("token_healing")


def _logprobs_to_ask(body: CompletionBody) -> int | None:
    """The best answers are chosen by their logprobs."""
    return 0 if body.logprobs is None and body.candidates > body.choices else body.logprobs


def _scored(
    context: ServerContext, body: CompletionBody, asks: Sequence[Ask], echoes: Sequence[str]
) -> list[ScoredPrompt]:
    if body.prompt_alternatives is None:
        return []
    tokenizer, listed_k, echoed_k = context.tokenizer, body.prompt_logprobs, body.echoed_alternatives
    pairs = zip(asks, echoes, strict=True)
    return [ScoredPrompt(tokenizer, ask.prompt_ids, echo, listed_k, echoed_k) for ask, echo in pairs]


def _new_logprobs(context: ServerContext, body: CompletionBody) -> partial[CompletionLogprobs] | None:
    if body.logprobs is None:
        return None
    return partial(CompletionLogprobs, context.tokenizer, body.logprobs, body.skip_special_tokens is not False)
