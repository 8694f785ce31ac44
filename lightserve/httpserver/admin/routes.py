"""Routes about the server itself: model, version, health, metrics, load, and aborting requests."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lightserve import __version__
from lightserve.errors import InvalidRequestError, UnavailableError
from lightserve.httpserver.admin.batch_metrics import batch_metrics
from lightserve.httpserver.admin.debug_requests import add_debug_requests
from lightserve.httpserver.admin.invocations import add_invocations
from lightserve.httpserver.admin.key_metrics import key_metrics
from lightserve.httpserver.admin.metrics_page import CONTENT_TYPE, MetricsPage
from lightserve.httpserver.admin.models import add_adapters, add_models
from lightserve.httpserver.admin.profile import add_profile
from lightserve.httpserver.admin.server_info import add_server_info
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, openapi_body
from lightserve.httpserver.http.errors import error_response

MAX_ABORTED = 1024  # ids of one request

RequestId = str | int  # LightLLM's ids are integers


class AbortBody(Body):
    request_id: RequestId | None = Field(None, description="the X-Request-Id of the request to abort")
    rid: RequestId | Annotated[list[RequestId], Field(max_length=MAX_ABORTED, fail_fast=True)] | None = Field(
        None, description="the same, or several (SGLang's name)"
    )
    abort_all: bool | None = Field(None, description="abort all requests instead")

    @property
    def request_ids(self) -> list[str]:
        several = self.rid if isinstance(self.rid, list) else [self.rid]
        return [
            str(request_id) for request_id in dict.fromkeys((self.request_id, *several)) if request_id not in (None, "")
        ]


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter()
    add_models(router, context)
    _add_names(router, context)
    _add_health(router, context)
    _add_load(router, context)
    _add_abort(router, context)
    add_debug_requests(router, context)
    add_profile(router, context)
    add_adapters(router, context)
    add_server_info(router, context)
    add_invocations(router, context)
    return router


def _add_names(router: APIRouter, context: ServerContext) -> None:
    @router.get("/get_model_name")
    @router.post("/get_model_name")
    async def get_model_name() -> JSONResponse:
        return JSONResponse({"model_name": context.model_name})

    @router.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})


def _add_health(router: APIRouter, context: ServerContext) -> None:
    @router.get("/health")
    @router.head("/health")
    @router.get("/healthz")
    @router.head("/healthz")
    @router.get("/readiness")
    @router.post("/readiness")
    async def health() -> Response:
        """200 only if a token can be generated now."""
        unhealthy_reason = context.manager.unhealthy_reason()
        if unhealthy_reason is None:
            return JSONResponse({"status": "ok"})
        return error_response(UnavailableError(unhealthy_reason))  # not raised: a probe needs no log line

    @router.get("/liveness")
    @router.post("/liveness")
    @router.get("/ping")
    async def liveness() -> JSONResponse:
        """200 as long as this process runs."""
        return JSONResponse({"status": "ok"})


def _add_load(router: APIRouter, context: ServerContext) -> None:
    manager = context.manager
    page = MetricsPage(context.model_name, context.config.compat_names)

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Prometheus text: every metric as soon as the server is ready."""
        stats = await manager.latest_stats()
        snapshot = None if stats is None else stats.metrics
        text = page.render(snapshot, is_up=manager.unhealthy_reason() is None)
        if context.batches is not None:
            text += batch_metrics(context.model_name, await asyncio.to_thread(context.batches.totals))
        if totals := context.keys.limiter.totals(context.visible_owner(request)):
            text += key_metrics(context.model_name, totals)
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/token_load")
    async def token_load() -> JSONResponse:
        """The share of the KV pool that is used, under LightLLM's three names."""
        stats = await manager.latest_stats()
        used = 0.0 if stats is None else stats.metrics.values["kv_cache_usage_perc"]
        return JSONResponse(dict.fromkeys(("current_load", "logical_max_load", "dynamic_max_load"), used))

    @router.get("/load")
    async def load() -> JSONResponse:
        """Requests that run in this HTTP process, and those whose images it reads."""
        reading = 0 if context.images is None else context.images.stats.num_reading
        return JSONResponse({"server_load": manager.running_requests + reading})


def _add_abort(router: APIRouter, context: ServerContext) -> None:
    @router.post("/abort_request", openapi_extra=openapi_body(AbortBody))
    async def abort_request(request: Request) -> JSONResponse:
        """Abort the requests with an id, or all. An unknown id is not an error: its request may just have ended.

        An API key aborts only requests that it has made.
        """
        body = await context.read_body(request, AbortBody)
        if not body.abort_all and not body.request_ids:
            raise InvalidRequestError("give request_id, or abort_all: true", "request_id")
        for request_id in (None,) if body.abort_all else body.request_ids:
            context.manager.abort_requests(request_id, context.visible_owner(request))
        return JSONResponse({"status": "ok"})
