"""POST /v1/responses."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import WebSocketError
from lightserve.httpserver.chat.parts import collect_parts
from lightserve.httpserver.chat.prepare import prepare_chat
from lightserve.httpserver.chat.tool_rounds import RoundEvents, ToolRounds, collect_rounds
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import Generation
from lightserve.httpserver.http.body import JsonObject, json_response, openapi_body
from lightserve.httpserver.http.sse import OPENAPI_STREAM, EventStream, GenerationEvents
from lightserve.httpserver.openai.logprobs import chat_logprobs
from lightserve.httpserver.openai.responses.background import BackgroundResponses, check_background
from lightserve.httpserver.openai.responses.history import input_items, with_history
from lightserve.httpserver.openai.responses.hosted import Continuation, HostedChat
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
from lightserve.mcp.toolbox import closing_on_error
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
        hosted = await HostedChat.open(context, body)
        toolbox = None if hosted is None else hosted.toolbox
        with closing_on_error(toolbox):
            prompted = body if hosted is None else hosted.with_approved(value, body)
            translation = translate_responses(prompted, context.images is not None, toolbox)
            chat = await prepare_chat(context, request, translation.chat, body.logprobs)
            spec = _spec(context, _response_id(request), echoed, body, translation, is_stored)
            spec = spec if hosted is None else hosted.describe(spec)
            response = ResponsesResponse(chat.output.new_parser(), chat.log, spec)
            saved = SavedResponse(store, owner, response, input_items(value)) if is_stored else None
            chat.log.response_id = response.id
            run = Run(context.manager.generate(chat.prompt_requests, chat.log), response, saved)
            if toolbox is not None:
                run.rounds = Continuation(context, request, value, toolbox, response).rounds(run.generation)
            if body.background and saved is not None:
                await background.start(run.generation, saved, run.rounds)
                return json_response(response.body())
            return await _respond(request, body, run)

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


@dataclass(slots=True)
class Run:
    """A response that is about to be generated."""

    generation: Generation
    response: ResponsesResponse
    saved: SavedResponse | None
    rounds: ToolRounds | None = None  # None: this server calls no tools


async def _respond(request: Request, body: ResponsesBody, run: Run) -> Response:
    saved, rounds = run.saved, run.rounds
    if body.stream:
        log = run.generation.log
        events = (
            GenerationEvents(run.generation, run.response, log.request_id) if rounds is None else RoundEvents(rounds)
        )
        if saved is not None:
            events.generator = saved_events(events.generator, saved)
        return await EventStream.open(request, events)
    if rounds is not None:
        await collect_rounds(request, rounds)
    else:
        await collect_parts(request, run.generation, run.response)
    if saved is not None:
        await saved.save()
    return json_response(run.response.body())
