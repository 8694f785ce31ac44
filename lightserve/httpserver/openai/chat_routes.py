"""POST /v1/chat/completions, and /render below it: the prompt of a chat without an answer."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import ForbiddenError, InvalidRequestError
from lightserve.httpserver.chat.prepare import PreparedChat, prepare_chat
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.generation import validate_supported
from lightserve.httpserver.http.body import JsonObject, json_response, openapi_body
from lightserve.httpserver.http.sse import OPENAPI_STREAM
from lightserve.httpserver.openai.beam_response import respond_with_beam_search
from lightserve.httpserver.openai.logprobs import PromptLogprobsWriter, chat_logprobs
from lightserve.httpserver.openai.rendered_chat import ID_PREFIX, rendered
from lightserve.httpserver.openai.response import EndpointFormat, ResponseSpec, message_fields
from lightserve.httpserver.openai.stream import respond
from lightserve.model_files.template.chat_template import MAX_TEMPLATE_LENGTH

PATH = "/v1/chat/completions"
TEMPLATE_FIELD = "chat_template"
CHAT = EndpointFormat(
    id_prefix=ID_PREFIX,
    object_name="chat.completion",
    chunk_object_name="chat.completion.chunk",
    text_fields=lambda text: {"message": message_fields(text)},
    first=lambda echo: b'"delta":{"role":"assistant","content":%b}' % orjson.dumps(echo),
    before_text=b'"delta":{"content":',
    after_text=b"}",
    last=b'"delta":{"content":""}',
    has_prompt_fields_in_choice=False,
)


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post(PATH, responses=OPENAPI_STREAM, openapi_extra=openapi_body(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await _read_chat(context, request)
        k = body.top_logprobs or 0 if body.logprobs else None
        chat = await prepare_chat(context, request, body, k)
        chat.log.counts_output = not body.is_prompt_only
        spec = ResponseSpec(
            endpoint=CHAT,
            request_id=chat.log.request_id,
            model=context.shown_model(body.model),
            n=body.choices,
            echoes=[body.echoed_text] * body.choices,
            new_logprobs=None
            if k is None
            else lambda _: chat_logprobs(context.tokenizer, k, bool(body.return_tokens_as_token_ids)),
            new_parser=None if chat.output.is_plain else chat.output.new_parser,
            prompt_logprobs=_prompt_logprobs(context, body, chat),
            prompt_token_ids=[prompt_request.prompt_ids for prompt_request in chat.prompt_requests]
            if body.return_token_ids
            else (),
            is_prompt_only=body.is_prompt_only,
            returns_aborted=context.config.enable_rl,
        )
        if body.beam_width is not None:
            return await respond_with_beam_search(context, request, body, chat.prompt_requests, spec, chat.log)
        generation = context.manager.generate(chat.prompt_requests, chat.log, body.choices)
        return await respond(request, body, generation, spec)

    @router.post(f"{PATH}/render", openapi_extra=openapi_body(ChatBody))
    async def render(request: Request) -> Response:
        """vLLM's: the prompt that a chat would have, as text and as token ids, and how it would be sampled."""
        body = await _read_chat(context, request)
        await context.find_model(body.model)
        chat = await prepare_chat(context, request, body)
        return json_response(rendered(chat, context.shown_model(body.model)))

    return router


async def _read_chat(context: ServerContext, request: Request) -> ChatBody:
    value = await context.read(request)
    template = _take_template(context, request, value)
    body = validate_supported(ChatBody, value)
    context.check_fields(request, body)
    if template is not None:
        body.use_template(await asyncio.to_thread(context.tokenizer.make_template, template))
    if context.config.enable_rl:
        body.show_unused_tools()
    body.limit_logprobs(context)
    return body


def _take_template(context: ServerContext, request: Request, value: JsonObject) -> str | None:
    """A trainer's, taken out of the body. Without --enable_rl the field stays there, and is refused."""
    text = value.get(TEMPLATE_FIELD)
    if text is None or not context.config.enable_rl:
        return None
    if not context.keys.administers(dict(request.scope["headers"])):
        raise ForbiddenError("chat_template: a request can set it with an admin key only", TEMPLATE_FIELD)
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_TEMPLATE_LENGTH:
        problem = f"chat_template: must be a text of 1 to {MAX_TEMPLATE_LENGTH} characters"
        raise InvalidRequestError(problem, TEMPLATE_FIELD)
    del value[TEMPLATE_FIELD]
    return text


def _prompt_logprobs(context: ServerContext, body: ChatBody, chat: PreparedChat) -> list[PromptLogprobsWriter]:
    k = body.prompt_logprobs
    if k is None:
        return []
    return [
        PromptLogprobsWriter(context.tokenizer, each.prompt_ids, field_k=k, placeholder=each.placeholder)
        for each in chat.prompt_requests
    ]
