"""/generate, /generate_stream, / and /info: TGI's and LightLLM's, by the body."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve import __version__
from lightserve.errors import LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate.schema import Schema, schema_of
from lightserve.httpserver.lightllm.request import NativeBody
from lightserve.httpserver.lightllm.response import lightllm_response
from lightserve.httpserver.tgi.errors import tgi_error_response
from lightserve.httpserver.tgi.request import MAX_STOPS, TgiBody
from lightserve.httpserver.tgi.response import tgi_response
from lightserve.httpserver.wire.body import documented
from lightserve.httpserver.wire.json_response import json_response
from lightserve.httpserver.wire.sse import DOCUMENTED


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["LightLLM and TGI"])

    @router.post("/generate", openapi_extra=_BODY)
    async def generate(request: Request) -> Response:
        """The whole answer."""
        return await _answer(context, request, streams=False)

    @router.post("/generate_stream", responses=DOCUMENTED, openapi_extra=_BODY)
    async def generate_stream(request: Request) -> Response:
        """The answer as server-sent events, one a token."""
        return await _answer(context, request, streams=True)

    @router.post("/", responses=DOCUMENTED, openapi_extra=_BODY)
    async def compatible(request: Request) -> Response:
        """Either of the two, by ``stream`` in the body."""
        return await _answer(context, request, streams=None)

    @router.get("/info")
    async def info(request: Request) -> Response:
        """The model and the limits, as TGI tells them."""
        try:
            return json_response(_info(context))
        except LightserveError as error:
            return tgi_error_response(error, request.state.request_id)

    return router


async def _answer(context: ServerContext, request: Request, streams: bool | None) -> Response:
    log = context.log(request)
    value = await context.read(request)
    default = Schema.TGI if context.config.use_tgi_api else Schema.LIGHTLLM
    if schema_of(value, default) is Schema.TGI:
        return await tgi_response(context, request, log, value, streams)
    return await lightllm_response(context, request, log, value, streams)


def _info(context: ServerContext) -> dict[str, Any]:
    total = context.manager.limits.max_req_total_len
    return {
        "model_id": context.model_name,
        "model_sha": None,
        "model_pipeline_tag": None,  # as TGI has it for a model folder; so POST / does not repeat the prompt
        "max_concurrent_requests": None,  # memory decides
        "max_best_of": context.config.max_choices,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": total - 1,
        "max_total_tokens": total,
        "validation_workers": context.config.num_processes,
        "max_client_batch_size": context.config.max_choices,
        "router": "lightserve",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


_BODY = documented(NativeBody, TgiBody)
