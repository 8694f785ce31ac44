"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, openapi_body, validate

MAX_NAME, MAX_PATH = 256, 4096

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


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
        body = validate(LoadBody, await context.read(request))
        context.check_fields(request, body)
        if body.lora_name in context.model_names:
            raise InvalidRequestError(f"lora_name: {body.lora_name!r} is the name of the base model", "lora_name")
        await context.manager.load_adapter(body.lora_name, body.lora_path, bool(body.load_inplace))
        return JSONResponse({"status": "ok", "message": f"the adapter {body.lora_name!r} is loaded"})

    @router.post("/v1/unload_lora_adapter", openapi_extra=openapi_body(UnloadBody))
    async def unload_lora_adapter(request: Request) -> JSONResponse:
        """Remove a LoRA adapter."""
        body = validate(UnloadBody, await context.read(request))
        context.check_fields(request, body)
        await context.manager.unload_adapter(body.lora_name)
        return JSONResponse({"status": "ok", "message": f"the adapter {body.lora_name!r} is unloaded"})
