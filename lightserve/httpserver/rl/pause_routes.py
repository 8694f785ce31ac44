"""Pause, resume, abort and the prefix cache, with the endpoints of vLLM and of SGLang."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from lightserve.errors import ConflictError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.generation import RequestId
from lightserve.httpserver.http.body import Body, openapi_body, validate
from lightserve.httpserver.rl.calls import ask, read_optional
from lightserve.messages.rl import (
    AbortAll,
    FlushCache,
    GetRlState,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
)

PAUSE_TIMEOUT_S = 3600.0  # mode wait: the longest request has to finish
MAX_ABORTED = 1000
IN_USE: dict[int | str, dict[str, Any]] = {400: {"content": {"text/plain": {}}, "description": "requests are open"}}


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] | None = Field(
        None, description="end all requests, move them back into the queue, or leave them as they are"
    )


class AbortRequestsBody(Body):
    request_ids: Annotated[list[RequestId], Field(max_length=MAX_ABORTED, fail_fast=True)] | None = Field(
        None, description="of requests or responses; default: all requests"
    )


def add_pause(router: APIRouter, context: ServerContext) -> None:
    _add_vllm(router, context)
    _add_abort(router, context)
    _add_sglang(router, context)
    _add_cache(router, context)


def _add_vllm(router: APIRouter, context: ServerContext) -> None:
    @router.post("/pause")
    async def pause(
        mode: Annotated[PauseMode, Query()] = "abort", clear_cache: Annotated[bool, Query()] = True
    ) -> JSONResponse:
        """End all requests with what they have, let them finish, or keep them. Returns when no step runs."""
        make = partial(PauseGeneration, mode=mode, clears_cache=clear_cache)
        await ask(context, make, PAUSE_TIMEOUT_S)
        return JSONResponse({"status": "paused"})

    @router.post("/resume")
    async def resume() -> JSONResponse:
        await ask(context, ResumeGeneration)
        return JSONResponse({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> JSONResponse:
        return JSONResponse({"is_paused": (await ask(context, GetRlState)).state.is_paused})


def _add_abort(router: APIRouter, context: ServerContext) -> None:
    async def abort(request: Request) -> JSONResponse:
        """End requests with the tokens that they have: status 200, finish reason abort.

        The reply counts all sequences that were aborted, or the ids that were given.
        """
        body = validate(AbortRequestsBody, await read_optional(context, request))
        context.check_fields(request, body)
        if not body.request_ids:
            return JSONResponse({"status": "aborted", "aborted": (await ask(context, AbortAll)).count})
        ids = dict.fromkeys(body.request_ids)
        for request_id in ids:
            context.manager.abort_requests(request_id)
        return JSONResponse({"status": "aborted", "aborted": len(ids)})

    for path in ("/abort_requests", "/inference/v1/abort_requests"):
        router.post(path, openapi_extra=openapi_body(AbortRequestsBody, is_required=False))(abort)


def _add_sglang(router: APIRouter, context: ServerContext) -> None:
    @router.post("/pause_generation", openapi_extra=openapi_body(PauseBody, is_required=False))
    async def pause_generation(request: Request) -> JSONResponse:
        """As /pause, but new requests always wait for /continue_generation."""
        body = validate(PauseBody, await read_optional(context, request))
        context.check_fields(request, body)
        mode: PauseMode = "keep" if body.mode in ("retract", "in_place") else "abort"
        make = partial(PauseGeneration, mode=mode, refuses_new=False, clears_cache=body.mode == "retract")
        await ask(context, make, PAUSE_TIMEOUT_S)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    @router.post("/continue_generation")
    async def continue_generation(request: Request) -> JSONResponse:
        await read_optional(context, request)
        await ask(context, ResumeGeneration)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


def _add_cache(router: APIRouter, context: ServerContext) -> None:
    async def flush_cache(request: Request) -> Response:
        """Drop all cached prefixes. 400 while requests are open, unless generation is paused."""
        await read_optional(context, request)
        try:
            await ask(context, FlushCache)
        except ConflictError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return PlainTextResponse("Cache flushed.\n")

    for add in (router.get, router.post):
        add("/flush_cache", response_class=PlainTextResponse, responses=IN_USE)(flush_cache)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(
        reset_running_requests: Annotated[bool, Query()] = False, reset_external: Annotated[bool, Query()] = False
    ) -> JSONResponse:
        """The same. With reset_running_requests, running requests compute their tokens again."""
        try:
            await ask(context, partial(FlushCache, preempts=reset_running_requests))
        except ConflictError as error:
            return _not_reset(error)
        return JSONResponse({"success": True})


def _not_reset(error: ConflictError) -> JSONResponse:
    shown: dict[str, Any] = {"success": False, "message": str(error)}
    return JSONResponse(shown)
