"""How the routes of trainers ask the router."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from starlette.requests import Request

from lightserve.errors import error_from_status
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import PAGE_HEADERS, JsonObject
from lightserve.messages.rl import RlQuery, RlReply

CALL_TIMEOUT_S = 30.0  # the steps in flight end within seconds


async def ask(
    context: ServerContext, make_query: Callable[[int], RlQuery], timeout_s: float = CALL_TIMEOUT_S
) -> RlReply:
    """The reply of all engines. One that is an error is raised."""
    reply = await context.manager.queries.ask(make_query, RlReply, timeout_s)
    if reply.status != 200:
        raise error_from_status(reply.status, reply.message)
    return reply


async def read_optional(context: ServerContext, request: Request) -> JsonObject:
    """The body, which may be missing or null, except from a web page: see read_json."""
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return await context.read(request) if has_body or not PAGE_HEADERS.isdisjoint(headers) else {}


def paths_of(router: APIRouter) -> frozenset[str]:
    return frozenset(str(getattr(route, "path", "")) for route in router.routes)
