"""Routes that generate text, on a server whose model computes embeddings or scores: each refuses its requests."""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.pooling.endpoints import endpoints_of
from lightserve.model_files.pooling import PoolingConfig

GENERATING = frozenset(
    {
        "/",
        "/api/chat",
        "/api/generate",
        "/generate",
        "/generate_stream",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    }
)


def refusing(route: BaseRoute, config: PoolingConfig) -> BaseRoute:
    """The route itself, unless it generates text."""
    if not isinstance(route, APIRoute) or route.path not in GENERATING or route.methods != {"POST"}:
        return route
    path = route.path
    offers = ", ".join(endpoints_of(config))

    async def refuse() -> Response:
        raise InvalidRequestError(
            f"{path} generates text, but the task of this model is {config.task}; use {offers} (--task)"
        )

    return APIRoute(path, refuse, methods=["POST"], tags=route.tags, openapi_extra=route.openapi_extra)
