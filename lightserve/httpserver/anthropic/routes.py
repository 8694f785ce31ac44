"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError, PromptTooLongError
from lightserve.httpserver.anthropic.hosted import Continuation, open_toolbox
from lightserve.httpserver.anthropic.request import MessagesBody, PromptBody, log_hosted, to_chat, to_prompt_chat
from lightserve.httpserver.anthropic.response import PATH, MessagesResponse, thread_error
from lightserve.httpserver.chat.output import check_tools
from lightserve.httpserver.chat.parts import respond_in_parts
from lightserve.httpserver.chat.prepare import prepare_chat
from lightserve.httpserver.chat.prompt import chat_prompt
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import json_response, openapi_body, validate
from lightserve.httpserver.http.sse import OPENAPI_STREAM
from lightserve.mcp.toolbox import closing_on_error


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])

    @router.post(PATH, responses=OPENAPI_STREAM, openapi_extra=openapi_body(MessagesBody))
    async def messages(request: Request) -> Response:
        value = await context.read(request)
        body = validate(MessagesBody, value)
        context.check_fields(request, body)
        if body.thread is not None:
            return json_response(thread_error(request.state.request_id), status=400)
        toolbox = await open_toolbox(context, body)
        with closing_on_error(toolbox), _prompt_limit():
            chat = await prepare_chat(context, request, to_chat(context, body, toolbox))
        log_hosted(body, chat.log.request_id)
        response = MessagesResponse(chat.output.new_parser(), chat.log, context.shown_model(body.model))
        response.is_clamped = chat.prompt_requests[0].params.stopping.max_new_tokens < body.max_tokens
        response.manages_context = body.context_management is not None
        generation = context.manager.generate(chat.prompt_requests, chat.log)
        if toolbox is not None:
            response.hosted = toolbox.tools
            return await Continuation(context, request, value, toolbox, response).respond(generation)
        return await respond_in_parts(request, body.stream, generation, response)

    @router.post(f"{PATH}/count_tokens", openapi_extra=openapi_body(PromptBody))
    async def count_tokens(request: Request) -> Response:
        """The number of prompt tokens of a request."""
        given = await context.read_body(request, PromptBody)
        body = to_prompt_chat(context, given)
        await context.find_model(body.model)
        check_tools(context, body)
        with _prompt_limit():
            _, ids = await chat_prompt(context, body)
        return json_response({"input_tokens": len(ids)})

    return router


@contextmanager
def _prompt_limit() -> Iterator[None]:
    """Refuse a prompt that is too long in Anthropic's words: agents recognise them and shorten the conversation."""
    try:
        yield
    except PromptTooLongError as error:
        message = f"prompt is too long: {error.length} tokens > {error.limit} maximum"
        raise InvalidRequestError(message, "messages") from error
