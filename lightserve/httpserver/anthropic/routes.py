"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.anthropic.errors import PATH
from lightserve.httpserver.anthropic.request import (
    MessagesBody,
    PromptBody,
    refuse_unsupported,
    to_chat,
    to_prompt_chat,
)
from lightserve.httpserver.anthropic.response import MessagesResponse
from lightserve.httpserver.chat.output import check_tools
from lightserve.httpserver.chat.parts import respond_in_parts
from lightserve.httpserver.chat.prepare import prepare_chat
from lightserve.httpserver.chat.prompt import chat_prompt
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.wire.body import openapi_body, validate
from lightserve.httpserver.wire.json_response import json_response
from lightserve.httpserver.wire.sse import OPENAPI_STREAM


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])

    @router.post(PATH, responses=OPENAPI_STREAM, openapi_extra=openapi_body(MessagesBody))
    async def messages(request: Request) -> Response:
        value = await context.read(request)
        refuse_unsupported(value)
        body = validate(MessagesBody, value)
        chat = await prepare_chat(context, request, to_chat(body))
        response = MessagesResponse(chat.output.new_parser(), chat.log, context.model_name)
        generation = context.manager.generate(chat.prompt_requests, chat.log)
        return await respond_in_parts(request, body.stream, generation, response)

    @router.post(f"{PATH}/count_tokens", openapi_extra=openapi_body(PromptBody))
    async def count_tokens(request: Request) -> Response:
        """The number of prompt tokens of a request."""
        value = await context.read(request)
        refuse_unsupported(value)
        body = to_prompt_chat(validate(PromptBody, value))
        context.check_model(body.model)
        check_tools(context, body)
        _, ids = await chat_prompt(context, body)
        return json_response({"input_tokens": len(ids)})

    return router
