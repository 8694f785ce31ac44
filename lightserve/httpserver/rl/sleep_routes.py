"""Sleep and wake up: vLLM's endpoints, and SGLang's with tags."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, openapi_body, validate
from lightserve.httpserver.rl.calls import ask, read_optional
from lightserve.httpserver.rl.pause_routes import PAUSE_TIMEOUT_S
from lightserve.messages.rl import MEMORY_TAGS, GetRlState, PauseMode, RlReply, Sleep, WakeUp

WAKE_TIMEOUT_S = 3600.0  # a large model may load for long
METHOD_HEADER = "X-Sleep-Method"  # where the body is null
OTHER_NAMES = {"graph": "cuda_graph"}  # LightLLM's


class MemoryBody(Body):
    tags: Annotated[list[str], Field(max_length=8)] | None = Field(
        None, description="weights, kv_cache, cuda_graph; default: all of them"
    )


def add_sleep(router: APIRouter, context: ServerContext) -> None:
    _add_vllm(router, context)
    _add_sglang(router, context)


def _add_vllm(router: APIRouter, context: ServerContext) -> None:
    @router.post("/sleep")
    async def sleep(
        level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Annotated[PauseMode, Query()] = "abort"
    ) -> JSONResponse:
        """Level 0 only pauses, 1 moves the weights to the host, 2 stops the workers. Requests that come wait."""
        tags = ["cuda_graph"] if level == 0 else []
        reply = await ask(context, partial(Sleep, mode=mode, tags=tags, keeps_weights=level < 2), PAUSE_TIMEOUT_S)
        return JSONResponse({"status": "sleeping", "level": level, "method": reply.method})

    @router.post("/release_kv_cache_memory")
    async def release_kv_cache_memory(mode: Annotated[PauseMode, Query()] = "abort") -> JSONResponse:
        """Free the memory of the KV cache only. Requests that come wait for /wake_up."""
        await ask(context, partial(Sleep, mode=mode, tags=["kv_cache"]), PAUSE_TIMEOUT_S)
        return JSONResponse({"status": "kv_cache_released"})

    @router.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query(max_length=8)] = None) -> JSONResponse:
        """Start the workers, and go on. With tags, requests go on when all that sleeps was woken."""
        reply = await ask(context, partial(WakeUp, tags=_checked(tags)), WAKE_TIMEOUT_S)
        status = "sleeping" if reply.state.is_sleeping else "awake"
        seconds = round(reply.seconds, 3)
        return JSONResponse({"status": status, "tags": tags, "method": reply.method, "seconds": seconds})

    @router.get("/is_sleeping")
    async def is_sleeping() -> JSONResponse:
        return JSONResponse({"is_sleeping": (await ask(context, GetRlState)).state.is_sleeping})


def _add_sglang(router: APIRouter, context: ServerContext) -> None:
    async def release_memory_occupation(request: Request) -> JSONResponse:
        """End all requests, and free the memory of the workers. Without the tag weights, that of the KV only."""
        tags = await _tags(context, request)
        return _null(await ask(context, partial(Sleep, tags=tags), PAUSE_TIMEOUT_S))

    async def resume_memory_occupation(request: Request) -> JSONResponse:
        """Take the memory again, and load the weights. Requests go on when all tags are resumed."""
        tags = await _tags(context, request)
        return _null(await ask(context, partial(WakeUp, tags=tags), WAKE_TIMEOUT_S))

    for path, endpoint in (
        ("/release_memory_occupation", release_memory_occupation),
        ("/resume_memory_occupation", resume_memory_occupation),
    ):
        router.get(path)(endpoint)
        router.post(path, openapi_extra=openapi_body(MemoryBody, is_required=False))(endpoint)


async def _tags(context: ServerContext, request: Request) -> list[str]:
    body = validate(MemoryBody, await read_optional(context, request))
    context.check_fields(request, body)
    return _checked(body.tags)


def _checked(tags: list[str] | None) -> list[str]:
    named = [OTHER_NAMES.get(tag, tag) for tag in tags or ()]
    for tag in named:
        if tag not in MEMORY_TAGS:
            raise InvalidRequestError(f"tags: {tag[:100]!r} is unknown; known are {', '.join(MEMORY_TAGS)}", "tags")
    return named


def _null(reply: RlReply) -> JSONResponse:
    return JSONResponse(None, headers={METHOD_HEADER: reply.method})
