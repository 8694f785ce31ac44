"""POST /start_profile and /stop_profile: a profile of the router and the workers, for Perfetto."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from lightserve.errors import ConflictError, LightserveError, error_from_status
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import PAGE_HEADERS, Body, openapi_body, validate
from lightserve.messages.output import ProfileReply
from lightserve.messages.request import StartProfile, StopProfile

DEFAULT_SECONDS, MAX_SECONDS = 10.0, 60.0
START_TIMEOUT_S, STOP_TIMEOUT_S = 90.0, 660.0  # longer than the router's own limits


class ProfileBody(Body):
    max_seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS)] = Field(
        DEFAULT_SECONDS, description="the profile ends after so many seconds, if it is not stopped before"
    )


def add_profile(router: APIRouter, context: ServerContext) -> None:
    queries = context.manager.queries

    @router.post("/start_profile", openapi_extra=openapi_body(ProfileBody, is_required=False))
    async def start_profile(request: Request) -> JSONResponse:
        """Start a profile. There is one at a time."""
        body = validate(ProfileBody, await _read(context, request))
        context.check_fields(request, body)
        seconds = body.max_seconds
        reply = await queries.ask(lambda query_id: StartProfile(query_id, seconds), ProfileReply, START_TIMEOUT_S)
        _check(reply)
        return JSONResponse({"status": "started", "max_seconds": seconds})

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> JSONResponse:
        """End the profile. The response comes when its file is written."""
        await _read(context, request)
        reply = await queries.ask(StopProfile, ProfileReply, STOP_TIMEOUT_S)
        _check(reply)
        return JSONResponse({"status": "written", "path": reply.path, "missing": reply.message or None})


async def _read(context: ServerContext, request: Request) -> dict[str, Any]:
    """The body, which may be missing, except from a web page: see read_json."""
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return await context.read(request) if has_body or not PAGE_HEADERS.isdisjoint(headers) else {}


def _check(reply: ProfileReply) -> None:
    if reply.status == ConflictError.status:
        raise ConflictError(reply.message)
    if reply.status != 200:
        error: LightserveError = error_from_status(reply.status, reply.message)
        raise error
