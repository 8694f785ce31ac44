"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.anthropic.errors import PATH
from lightserve.httpserver.anthropic.request import MessagesBody, PromptBody, chat_of, prompt_of, refuse_later
from lightserve.httpserver.anthropic.response import MessagesAnswer
from lightserve.httpserver.chat.output import check_tools
from lightserve.httpserver.chat.parts import respond_in_parts
from lightserve.httpserver.chat.prepare import prepare_chat
from lightserve.httpserver.chat.prompt import chat_prompt
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.wire.body import check, documented
from lightserve.httpserver.wire.json_response import json_response
from lightserve.httpserver.wire.sse import DOCUMENTED


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Anthropic"])

    @router.post(PATH, responses=DOCUMENTED, openapi_extra=documented(MessagesBody))
    async def messages(request: Request) -> Response:
        value = await context.read(request)
        refuse_later(value)
        body = check(MessagesBody, value)
        chat = await prepare_chat(context, request, chat_of(body))
        answer = MessagesAnswer(chat.plan.new_choice(), chat.log, context.model_name)
        generation = context.manager.generate(chat.asks, chat.log)
        return await respond_in_parts(request, body.stream, generation, answer)

    @router.post(f"{PATH}/count_tokens", openapi_extra=documented(PromptBody))
    async def count_tokens(request: Request) -> Response:
        """How long the prompt of such a request is."""
        value = await context.read(request)
        refuse_later(value)
        body = prompt_of(check(PromptBody, value))
        context.check_model(body.model)
        check_tools(context, body)
        _, ids = await chat_prompt(context, body)
        return json_response({"input_tokens": len(ids)})

    return router
