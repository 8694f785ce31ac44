"""GET /v1/models, as OpenAI and vLLM have it; in Anthropic's format for a client that sends ``anthropic-version``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from lightserve.httpserver.context import ServerContext

ANTHROPIC_HEADER = "anthropic-version"  # Anthropic's clients send it with every request


def add_models(router: APIRouter, context: ServerContext) -> None:
    @router.get("/v1/models")
    async def list_models(request: Request) -> JSONResponse:
        if ANTHROPIC_HEADER in request.headers:
            return JSONResponse(_anthropic_list(context))
        adapters = await context.manager.adapters() if context.has_adapters else []
        cards = [_card(context, name) for name in context.model_names]
        cards += [_card(context, card.name, card.path, parent=context.model_name) for card in adapters]
        return JSONResponse({"object": "list", "data": cards})

    @router.get("/v1/models/{model_id:path}")
    async def get_model(request: Request, model_id: str) -> JSONResponse:
        adapter = await context.find_model(model_id)
        if adapter:
            return JSONResponse(await _adapter_card(context, adapter))
        name = model_id if model_id in context.model_names else context.model_name
        make_card = _anthropic_card if ANTHROPIC_HEADER in request.headers else _card
        return JSONResponse(make_card(context, name))


async def _adapter_card(context: ServerContext, name: str) -> dict[str, Any]:
    paths = {card.name: card.path for card in await context.manager.adapters()}
    return _card(context, name, paths.get(name), parent=context.model_name)


def _card(context: ServerContext, name: str, root: str | None = None, parent: str | None = None) -> dict[str, Any]:
    """``parent``: the base model of an adapter, whose ``root`` is its folder."""
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "lightserve",
        "root": root or context.model_name,
        "parent": parent,
        "max_model_len": context.manager.limits.max_req_total_len,
        "permission": [],
    }


def _anthropic_list(context: ServerContext) -> dict[str, Any]:
    names = context.model_names
    cards = [_anthropic_card(context, name) for name in names]
    return {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def _anthropic_card(context: ServerContext, name: str) -> dict[str, Any]:
    limit = context.manager.limits.max_req_total_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": limit - 1,
        "max_tokens": limit - 1,
    }
