"""Ollama's routes about models: list, show, pull, and those that this server cannot do."""

from __future__ import annotations

from enum import Enum
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, json_response, openapi_body
from lightserve.httpserver.http.paths import NOT_SUPPORTED
from lightserve.httpserver.ollama.models import check_name, listed_models, running_models, shown_model
from lightserve.httpserver.ollama.response import PATH

# the version of Ollama whose API this is; VS Code needs 0.6.4, Codex 0.13.4
OLLAMA_VERSION = "0.20.0"
NDJSON = "application/x-ndjson"
REFUSED: list[str | Enum] = [NOT_SUPPORTED]
# what /openapi.json says about a response that may be a stream
OPENAPI_LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {}}}}


class NameBody(Body):
    model: str | None = None
    name: str | None = None  # the older name of the field
    stream: bool | None = None

    @property
    def given_name(self) -> str | None:
        return self.model or self.name


def add_model_routes(router: APIRouter, context: ServerContext) -> None:
    _add_list(router, context)
    _add_pull(router, context)
    _add_refused(router)


def _add_list(router: APIRouter, context: ServerContext) -> None:
    @router.get(f"{PATH}/version")
    @router.head(f"{PATH}/version")
    async def version() -> Response:
        """The version of Ollama's API, which clients compare with what they need."""
        return json_response({"version": OLLAMA_VERSION})

    @router.get(f"{PATH}/tags")
    @router.head(f"{PATH}/tags")
    async def tags() -> Response:
        return json_response({"models": listed_models(context)})

    @router.get(f"{PATH}/ps")
    async def ps() -> Response:
        return json_response({"models": running_models(context)})

    @router.post(f"{PATH}/show", openapi_extra=openapi_body(NameBody))
    async def show(request: Request) -> Response:
        body = await context.read_body(request, NameBody)
        return json_response(shown_model(context, check_name(context, body.given_name)))


def _add_pull(router: APIRouter, context: ServerContext) -> None:
    @router.post(f"{PATH}/pull", responses=OPENAPI_LINES, openapi_extra=openapi_body(NameBody))
    async def pull(request: Request) -> Response:
        """Success for the model of this server; no other can be had."""
        body = await context.read_body(request, NameBody)
        check_name(context, body.given_name)
        if body.stream is False:
            return json_response({"status": "success"})
        return Response(b'{"status":"pulling manifest"}\n{"status":"success"}\n', media_type=NDJSON)


def _add_refused(router: APIRouter) -> None:
    @router.post(f"{PATH}/create", tags=REFUSED)
    @router.post(f"{PATH}/copy", tags=REFUSED)
    @router.post(f"{PATH}/push", tags=REFUSED)
    @router.delete(f"{PATH}/delete", tags=REFUSED)
    async def change() -> Response:
        raise _change_error()

    @router.post(f"{PATH}/blobs/{{digest}}", tags=REFUSED)
    async def upload(digest: str) -> Response:
        raise _change_error()


def _change_error() -> InvalidRequestError:
    return InvalidRequestError("this server has one model (--model_dir); a request cannot create, copy or delete one")
