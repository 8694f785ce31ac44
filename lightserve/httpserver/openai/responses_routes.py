"""POST /v1/responses. Nothing is stored, so there is nothing to get."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import ResponseNotFoundError
from lightserve.httpserver.chat.parts import respond_in_parts
from lightserve.httpserver.chat.prepare import prepare_chat
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.openai.responses_request import ResponsesBody, chat_of, responses_body
from lightserve.httpserver.openai.responses_response import ResponsesAnswer
from lightserve.httpserver.wire.body import documented
from lightserve.httpserver.wire.sse import DOCUMENTED


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/responses", responses=DOCUMENTED, openapi_extra=documented(ResponsesBody))
    async def responses(request: Request) -> Response:
        value = await context.read(request)
        body = responses_body(value)
        chat = await prepare_chat(context, request, chat_of(body))
        answer = ResponsesAnswer(chat.plan.new_choice(), chat.log, context.model_name, value)
        generation = context.manager.generate(chat.asks, chat.log)
        return await respond_in_parts(request, body.stream, generation, answer)

    @router.get("/v1/responses/{response_id}")
    async def get_response(response_id: str) -> Response:
        raise ResponseNotFoundError(response_id)

    return router
