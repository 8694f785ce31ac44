"""GET /v1/models, as OpenAI, vLLM and Anthropic have it, and the loading of LoRA adapters, as vLLM has it.

A client that sends ``anthropic-version`` gets Anthropic's format.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, openapi_body

ANTHROPIC_HEADER = "anthropic-version"  # Anthropic's clients send it with every request
MAX_NAME, MAX_PATH = 256, 4096

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


def add_models(router: APIRouter, context: ServerContext) -> None:
    @router.get("/v1/models")
    async def list_models(request: Request) -> JSONResponse:
        if ANTHROPIC_HEADER in request.headers:
            return JSONResponse(_anthropic_list(context))
        adapters = await context.manager.queries.adapters() if context.has_adapters else []
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
    paths = {card.name: card.path for card in await context.manager.queries.adapters()}
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


class LoadBody(Body):
    lora_name: Name = Field(description="the name that requests use as the model")
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] = Field(
        description="its folder: a path from --lora_dir, or an absolute one below it"
    )
    load_inplace: bool | None = Field(
        None, description="replace an adapter of the same name; requests that run keep the old one"
    )


class UnloadBody(Body):
    lora_name: Name = Field(description="no new request can use it; requests that run finish with it")
    lora_int_id: int | None = Field(None, description="no effect: names are unique")


def add_adapters(router: APIRouter, context: ServerContext) -> None:
    @router.post("/v1/load_lora_adapter", openapi_extra=openapi_body(LoadBody))
    async def load_lora_adapter(request: Request) -> JSONResponse:
        """Add a LoRA adapter. The response comes when requests can use it."""
        body = await context.read_body(request, LoadBody)
        if body.lora_name in context.model_names:
            raise InvalidRequestError(f"lora_name: {body.lora_name!r} is the name of the base model", "lora_name")
        await context.manager.load_adapter(body.lora_name, body.lora_path, bool(body.load_inplace))
        return JSONResponse({"status": "ok", "message": f"the adapter {body.lora_name!r} is loaded"})

    @router.post("/v1/unload_lora_adapter", openapi_extra=openapi_body(UnloadBody))
    async def unload_lora_adapter(request: Request) -> JSONResponse:
        """Remove a LoRA adapter."""
        body = await context.read_body(request, UnloadBody)
        await context.manager.unload_adapter(body.lora_name)
        return JSONResponse({"status": "ok", "message": f"the adapter {body.lora_name!r} is unloaded"})
