"""POST /v1/responses. Responses are not stored: GET always gives 404."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import ResponseNotFoundError
from lightserve.httpserver.chat.parts import respond_in_parts
from lightserve.httpserver.chat.prepare import prepare_chat
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.openai.responses_request import ResponsesBody, to_chat, validate_responses
from lightserve.httpserver.openai.responses_response import ResponsesResponse
from lightserve.httpserver.wire.body import openapi_body
from lightserve.httpserver.wire.sse import OPENAPI_STREAM


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/responses", responses=OPENAPI_STREAM, openapi_extra=openapi_body(ResponsesBody))
    async def responses(request: Request) -> Response:
        value = await context.read(request)
        body = validate_responses(value)
        chat = await prepare_chat(context, request, to_chat(body))
        response = ResponsesResponse(chat.output.new_parser(), chat.log, context.model_name, value)
        generation = context.manager.generate(chat.prompt_requests, chat.log)
        return await respond_in_parts(request, body.stream, generation, response)

    @router.get("/v1/responses/{response_id}")
    async def get_response(response_id: str) -> Response:
        raise ResponseNotFoundError(response_id)

    return router
