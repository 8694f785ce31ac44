"""/generate, /generate_stream and /, whose body is LightLLM's or TGI's, and TGI's /info."""

from __future__ import annotations

import enum
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve import __version__
from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate.lightllm.request import UNSUPPORTED, LightllmBody, LightllmParameters
from lightserve.httpserver.generate.lightllm.response import lightllm_response
from lightserve.httpserver.generate.sglang.request import SglangBody
from lightserve.httpserver.generate.sglang.response import sglang_response
from lightserve.httpserver.generate.tgi.errors import tgi_error_response
from lightserve.httpserver.generate.tgi.request import MAX_STOPS, TgiBody, TgiParameters
from lightserve.httpserver.generate.tgi.response import tgi_response
from lightserve.httpserver.http.body import json_response, openapi_body
from lightserve.httpserver.http.sse import OPENAPI_STREAM


class Schema(enum.Enum):
    LIGHTLLM = "LightLLM"
    TGI = "TGI"


# parameters of LightLLM's clients that have no effect here; they still show whose body it is
WITHOUT_EFFECT = (
    "add_spaces_between_special_tokens",
    "group_request_id",
    "move_kv_to_decode_node",
    "suggested_dp_index",
)
WORKS_IN_BOTH = frozenset({"seed"})  # alone it means TGI, but LightLLM's bodies may have it too
_LIGHTLLM = frozenset({*LightllmParameters.model_fields, *UNSUPPORTED, *WITHOUT_EFFECT})
_TGI = frozenset(TgiParameters.model_fields)
LIGHTLLM_ONLY = _LIGHTLLM - _TGI
TGI_ONLY = (_TGI - _LIGHTLLM) | WORKS_IN_BOTH


def is_sglang(body: dict[str, Any]) -> bool:
    """Neither LightLLM's nor TGI's bodies have these keys."""
    return "inputs" not in body and ("sampling_params" in body or "input_ids" in body)


def schema_of(body: dict[str, Any], default: Schema) -> Schema:
    """Select by the parameters that only one of them has; null means absent. A mix of both is refused."""
    parameters = body.get("parameters")
    given = {name for name, value in parameters.items() if value is not None} if isinstance(parameters, dict) else set()
    lightllm, tgi = given & LIGHTLLM_ONLY, given & TGI_ONLY
    if isinstance(body.get("inputs"), list):
        lightllm |= {"inputs as token ids"}
    if body.get("multimodal_params") is not None:
        lightllm |= {"multimodal_params"}
    if lightllm and tgi - WORKS_IN_BOTH:
        lightllm_name, tgi_name = min(lightllm), min(tgi - WORKS_IN_BOTH)
        raise InvalidRequestError(
            f"{lightllm_name} belongs to LightLLM's schema and {tgi_name} to TGI's: use one of the two"
        )
    if lightllm:
        return Schema.LIGHTLLM
    return Schema.TGI if tgi else default


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["LightLLM and TGI"])

    @router.post("/generate", openapi_extra=_BODY)
    async def generate(request: Request) -> Response:
        """The whole response."""
        return await _respond(context, request, streams=False)

    @router.post("/generate_stream", responses=OPENAPI_STREAM, openapi_extra=_BODY)
    async def generate_stream(request: Request) -> Response:
        """The response as server-sent events, one per token."""
        return await _respond(context, request, streams=True)

    @router.post("/", responses=OPENAPI_STREAM, openapi_extra=_BODY)
    async def compatible(request: Request) -> Response:
        """The field ``stream`` of the body selects one of the two."""
        return await _respond(context, request, streams=None)

    @router.get("/info")
    async def info(request: Request) -> Response:
        """The model and the limits in TGI's format."""
        try:
            return json_response(_info(context))
        except LightserveError as error:
            return tgi_error_response(error, request)

    return router


async def _respond(context: ServerContext, request: Request, streams: bool | None) -> Response:
    log = context.log(request)
    value = await context.read(request)
    # only clients of TGI, such as Hugging Face's InferenceClient, use the root path
    default = Schema.TGI if context.config.use_tgi_api or streams is None else Schema.LIGHTLLM
    if is_sglang(value):
        return await sglang_response(context, request, log, value, streams or None)
    if schema_of(value, default) is Schema.TGI:
        return await tgi_response(context, request, log, value, streams)
    return await lightllm_response(context, request, log, value, streams)


def _info(context: ServerContext) -> dict[str, Any]:
    total = context.manager.limits.max_req_total_len
    return {
        "model_id": context.model_name,
        "model_sha": None,
        "model_pipeline_tag": None,  # TGI's value for a model folder; with it POST / does not repeat the prompt
        "max_concurrent_requests": None,  # limited by memory
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


_BODY = openapi_body(LightllmBody, TgiBody, SglangBody)
