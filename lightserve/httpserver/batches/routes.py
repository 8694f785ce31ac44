"""/v1/files, /v1/batches and /v1/messages/batches. Without --batch_dir they say how to turn them on."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.responses import Response

from lightserve.batches.store import BatchStore
from lightserve.errors import InvalidRequestError
from lightserve.httpserver.batches.batch_routes import add_batch_routes
from lightserve.httpserver.batches.file_routes import add_file_routes
from lightserve.httpserver.batches.message_routes import add_message_routes
from lightserve.httpserver.context import ServerContext


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Batches"])
    store = context.batches or BatchStore("")
    add_file_routes(router, context, store)
    add_batch_routes(router, context, store)
    add_message_routes(router, context, store)
    if context.batches is None:
        router.routes[:] = [_refusing(route) for route in router.routes if isinstance(route, APIRoute)]
    return router


def _refusing(route: APIRoute) -> APIRoute:
    async def refuse() -> Response:
        raise InvalidRequestError("this server has no files and batches; start it with --batch_dir FOLDER")

    methods = sorted(route.methods or ())
    return APIRoute(route.path, refuse, methods=methods, tags=route.tags, openapi_extra=route.openapi_extra)
