"""POST /api/chat and /api/generate, as Ollama has them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.chat.choice_parser import ChoiceParser
from lightserve.httpserver.chat.output import output_formats
from lightserve.httpserver.chat.prepare import PreparedChat, Render, prepare_chat
from lightserve.httpserver.chat.prompt import chat_prompt
from lightserve.httpserver.chat.request import ChatBody
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import JsonObject, openapi_body
from lightserve.httpserver.ollama.embed_routes import add_embed_routes
from lightserve.httpserver.ollama.fill_in_the_middle import fill_prompt
from lightserve.httpserver.ollama.model_routes import OPENAPI_LINES, add_model_routes
from lightserve.httpserver.ollama.models import adapter_model, check_name
from lightserve.httpserver.ollama.request import (
    ChatRequest,
    GenerateRequest,
    GenerationRequest,
    chat_of,
    generation_of,
    refuse_unsupported,
)
from lightserve.httpserver.ollama.response import (
    CHAT,
    GENERATE,
    PATH,
    Layout,
    OutputSpec,
    loaded_response,
    respond,
    token_logprobs,
)
from lightserve.messages.output import StrOut


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Ollama"])

    @router.post(f"{PATH}/chat", responses=OPENAPI_LINES, openapi_extra=openapi_body(ChatRequest))
    async def chat(request: Request) -> Response:
        body = await context.read_body(request, ChatRequest)
        name = _check(context, body)
        refuse_unsupported(body)
        if not body.messages:
            return _loaded(context, CHAT, name)
        chat_body = _with_adapter(context, chat_of(body), name)
        prepared = await prepare_chat(context, request, chat_body, body.top_k_logprobs)
        spec = OutputSpec(CHAT, name, _parser(prepared), _logprobs(context, body))
        generation = context.manager.generate(prepared.prompt_requests, prepared.log)
        return await respond(request, body.is_stream, generation, spec)

    @router.post(f"{PATH}/generate", responses=OPENAPI_LINES, openapi_extra=openapi_body(GenerateRequest))
    async def generate(request: Request) -> Response:
        body = await context.read_body(request, GenerateRequest)
        name = _check(context, body)
        refuse_unsupported(body)
        if not body.prompt and not body.suffix:
            return _loaded(context, GENERATE, name)
        has_template = _uses_template(context, body)
        chat = _with_adapter(context, generation_of(body, has_template), name)
        render = _with_context(body) if has_template else _plain(body)
        prepared = await prepare_chat(context, request, chat, body.top_k_logprobs, render)
        ids = None if body.raw else prepared.prompt_requests[0].prompt_ids
        spec = OutputSpec(GENERATE, name, _parser(prepared), _logprobs(context, body), ids)
        generation = context.manager.generate(prepared.prompt_requests, prepared.log)
        return await respond(request, body.is_stream, generation, spec)

    add_embed_routes(router, context)
    add_model_routes(router, context)
    return router


def _check(context: ServerContext, body: GenerationRequest) -> str:
    """The name of the model. Clients know the words "does not support thinking" and "... tools"."""
    name, formats = check_name(context, body.model), output_formats(context)
    if body.think and formats.reasoning is None:
        raise InvalidRequestError(f"think: {name!r} does not support thinking (--reasoning_parser)", "think")
    if isinstance(body, ChatRequest) and body.tools and formats.tools is None:
        raise InvalidRequestError(f"tools: {name!r} does not support tools (--tool_call_parser)", "tools")
    return name


def _with_adapter(context: ServerContext, chat: ChatBody, name: str) -> ChatBody:
    return chat.model_copy(update={"model": adapter_model(context, name)})


def _loaded(context: ServerContext, layout: Layout, name: str) -> Response:
    _ = context.manager.limits  # raises while the model loads
    return loaded_response(layout, name)


def _parser(prepared: PreparedChat) -> ChoiceParser | None:
    return None if prepared.output.is_plain else prepared.output.new_parser()


def _logprobs(context: ServerContext, body: GenerationRequest) -> Callable[[StrOut], JsonObject] | None:
    k = body.top_k_logprobs
    return None if k is None else token_logprobs(context.tokenizer, k)


# prompts of /api/generate


def _uses_template(context: ServerContext, body: GenerateRequest) -> bool:
    """A model without a chat template continues the prompt, unless there is a system message to place."""
    if body.raw or body.suffix:
        return False
    return context.tokenizer.has_chat_template or bool(body.system)


def _plain(body: GenerateRequest) -> Render:
    """The prompt itself, or with the suffix after it."""

    async def render(context: ServerContext, chat: ChatBody) -> tuple[str, list[int]]:
        text = body.prompt or ""
        if body.suffix:
            text = fill_prompt(context.tokenizer, text, body.suffix)
        return text, [*_context_ids(context, body), *await context.encode(text)]

    return render


def _with_context(body: GenerateRequest) -> Render:
    """The conversation so far, and the prompt as the next turn."""

    async def render(context: ServerContext, chat: ChatBody) -> tuple[str, list[int]]:
        text, ids = await chat_prompt(context, chat)
        return text, [*_context_ids(context, body), *ids]

    return render


def _context_ids(context: ServerContext, body: GenerateRequest) -> list[int]:
    context.manager.check_ids("context", body.context or [])
    return body.context or []
