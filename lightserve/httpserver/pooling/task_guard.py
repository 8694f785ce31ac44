"""The endpoints of a model that computes no text. Routes that generate text refuse its requests and name them."""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightserve.errors import InvalidRequestError
from lightserve.model_files.pooling import PoolingConfig

PAIRS = ("/score", "/rerank")
LABELS = ("/classify", "/predict")
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


def endpoints_of(config: PoolingConfig) -> tuple[str, ...]:
    """Those of its task come first."""
    pairs = PAIRS if config.is_pair_scorer else ()
    reward = ("/get_score",) if config.size == 1 else ()
    endpoints: tuple[str, ...]
    match config.task:
        case "embed":
            endpoints = ("/v1/embeddings", "/embed", *PAIRS)
        case "token_embed":
            endpoints = PAIRS
        case "classify":
            endpoints = (*LABELS, *pairs, *reward)
        case "score":
            endpoints = (*pairs, *LABELS, *reward)
        case _:
            endpoints = (*reward, *pairs)
    return (*endpoints, "/pooling")


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
