"""POST /v1/responses."""

from __future__ import annotations

import os

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import WebSocketError
from lightserve.httpserver.chat.parts import collect_parts
from lightserve.httpserver.chat.prepare import PreparedChat, prepare_chat
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import JsonObject, json_response, openapi_body
from lightserve.httpserver.http.sse import OPENAPI_STREAM, EventStream, GenerationEvents
from lightserve.httpserver.openai.logprobs import chat_logprobs
from lightserve.httpserver.openai.responses.background import BackgroundResponses, check_background
from lightserve.httpserver.openai.responses.history import input_items, with_history
from lightserve.httpserver.openai.responses.request import (
    ResponsesBody,
    ResponsesTranslation,
    translate_responses,
    validate_responses,
)
from lightserve.httpserver.openai.responses.response import ResponsesResponse, ResponsesSpec
from lightserve.httpserver.openai.responses.saving import SavedResponse, saved_events
from lightserve.httpserver.openai.responses.store import ResponseStore
from lightserve.httpserver.openai.responses.stored_routes import add_stored_routes
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

PATH = "/v1/responses"


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    config = context.config
    sizes = config.response_store_size, config.response_store_bytes
    store = ResponseStore(context.run_dir, *sizes, context.http_index)
    store.fail_lost()
    background = BackgroundResponses(config.response_store_size)

    @router.post(PATH, responses=OPENAPI_STREAM, openapi_extra=openapi_body(ResponsesBody))
    async def responses(request: Request) -> Response:
        value = await context.read(request)
        echoed = dict(value)
        owner = context.owner(request)
        body = validate_responses(value)
        context.check_fields(request, body)
        body = await with_history(store, owner, value, body)
        is_stored = body.store is not False and store.is_enabled
        check_background(body, is_stored)
        translation = translate_responses(body, context.images is not None)
        chat = await prepare_chat(context, request, translation.chat, body.logprobs)
        spec = _spec(context, _response_id(request), echoed, body, translation, is_stored)
        response = ResponsesResponse(chat.output.new_parser(), chat.log, spec)
        saved = SavedResponse(store, owner, response, input_items(value)) if is_stored else None
        chat.log.response_id = response.id
        if body.background and saved is not None:
            await background.start(context.manager.generate(chat.prompt_requests, chat.log), saved)
            return json_response(response.body())
        return await _respond(context, request, body, chat, response, saved)

    @router.get(PATH, include_in_schema=False)
    async def connect(request: Request) -> Response:
        """Codex offers WebSocket to some servers. It uses HTTP at once when the status is 426."""
        if "sec-websocket-key" in request.headers:
            raise WebSocketError(f"this server does not use WebSocket; send POST {PATH}")
        raise HTTPException(405)

    add_stored_routes(router, context, store)
    return router


def _response_id(request: Request) -> str:
    """Not the request id: clients may choose that, and without API keys all that know this id can read the response.

    It is in the state of the request, so that who continues a stream of another process can give it the same.
    """
    response_id: str = request.scope["state"].setdefault("response_id", f"resp_{os.urandom(16).hex()}")
    return response_id


def _spec(
    context: ServerContext,
    response_id: str,
    value: JsonObject,
    body: ResponsesBody,
    translation: ResponsesTranslation,
    is_stored: bool,
) -> ResponsesSpec:
    if translation.ignored and not context.config.disable_log_requests:
        kinds = ", ".join(sorted({entry["type"] for entry in translation.ignored}))
        logger.info("%s: left out of the prompt: %s", response_id, kinds)
    return ResponsesSpec(
        model=context.shown_model(body.model),
        response_id=response_id,
        body=value,
        tools=translation.tools.ids,
        ignored=translation.ignored,
        is_stored=is_stored,
        logprobs_of=None if body.logprobs is None else chat_logprobs(context.tokenizer, body.logprobs),
        encrypts_reasoning=body.wants_encrypted_reasoning,
    )


async def _respond(
    context: ServerContext,
    request: Request,
    body: ResponsesBody,
    chat: PreparedChat,
    response: ResponsesResponse,
    saved: SavedResponse | None,
) -> Response:
    generation = context.manager.generate(chat.prompt_requests, chat.log)
    if body.stream:
        events = GenerationEvents(generation, response, chat.log.request_id)
        if saved is not None:
            events.generator = saved_events(events.generator, saved)
        return await EventStream.open(request, events)
    await collect_parts(request, generation, response)
    if saved is not None:
        await saved.save()
    return json_response(response.body())
