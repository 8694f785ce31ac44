"""From the body of a chat to requests for the engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from msgspec import structs
from starlette.requests import Request

from lightserve.httpserver.chat.images import read_images
from lightserve.httpserver.chat.output import OutputPlan, chat_grammar, check_tools, output_formats, output_plan
from lightserve.httpserver.chat.prompt import chat_prompt, generation_prompt, generation_prompt_len
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.fields.images import with_images
from lightserve.httpserver.fields.sampling import build_prompt_requests, check_choices
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.messages.params import MAX_PREDICTION

Render = Callable[[ServerContext, ChatBody], Awaitable[tuple[str, list[int]]]]  # the prompt as text and as token ids


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that is ready to generate."""

    prompt: str  # the whole text, before truncation
    prompt_requests: list[PromptRequest]
    output: OutputPlan
    log: AccessLog


async def prepare_chat(
    context: ServerContext,
    request: Request,
    body: ChatBody,
    logprobs: int | None = None,
    render: Render = chat_prompt,
    log: AccessLog | None = None,
) -> PreparedChat:
    """Prepare a chat of any API. ``logprobs``: how many alternatives to each token; None: no logprobs. ``log``: of
    the chat that this one continues; None: there is none."""
    context.check_model(body.model)
    body.limit_logprobs(context)
    check_choices(context, 1, body.beam_width or body.choices)
    if log is None:
        log = context.log(request, body.request_id or body.rid)
    check_tools(context, body)
    await _read_images(context, body, log)
    prompt, ids = await render(context, body)
    reasoning = output_formats(context).reasoning
    tags = () if reasoning is None else (reasoning.begin, reasoning.end)
    output = output_plan(context, body, await generation_prompt(context, body, prompt, tags))
    grammar = await chat_grammar(context, output)
    prompt_requests = build_prompt_requests(context, body, [ids], logprobs, grammar=grammar)
    prompt_requests = [with_images(context, body.read_images, prompt_request) for prompt_request in prompt_requests]
    log.prompt_tokens += len(prompt_requests[0].prompt_ids)
    if num_tokens := generation_prompt_len(context, body, prompt):
        prompt_requests = [_with_generation_prompt(prompt_request, num_tokens) for prompt_request in prompt_requests]
    log.audio_tokens = sum(size.tokens for size in body.image_sizes if size.seconds)
    log.image_tokens = sum(image.tokens for image in prompt_requests[0].images) - log.audio_tokens
    predicted = await _prediction_ids(context, body)
    prompt_requests = [_with_prediction(output.apply(prompt_request), predicted) for prompt_request in prompt_requests]
    return PreparedChat(prompt, prompt_requests, output, log)


async def _read_images(context: ServerContext, body: ChatBody, log: AccessLog) -> None:
    begin_s = time.monotonic()
    await read_images(context, body)
    if body.read_images:
        log.images_read_s = begin_s, time.monotonic()


def _with_generation_prompt(prompt_request: PromptRequest, num_tokens: int) -> PromptRequest:
    scheduling = structs.replace(prompt_request.scheduling, generation_prompt_len=num_tokens)
    return replace(prompt_request, scheduling=scheduling)


async def _prediction_ids(context: ServerContext, body: ChatBody) -> tuple[int, ...]:
    """The tokens that the client expects; those beyond the limit are left out. (): no engine would use them."""
    if body.prediction is None or not body.prediction.content or not context.drafts_tokens:
        return ()
    ids = await context.encode(body.prediction.content, add_special_tokens=False)
    return tuple(ids[:MAX_PREDICTION])


def _with_prediction(prompt_request: PromptRequest, ids: tuple[int, ...]) -> PromptRequest:
    return replace(prompt_request, params=prompt_request.params.replace(prediction_ids=ids)) if ids else prompt_request
