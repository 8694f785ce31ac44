"""The HTTP application: routes, middleware, error handlers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from lightserve import __version__
from lightserve.httpserver.admin import routes as admin_routes, tokenize as tokenize_routes
from lightserve.httpserver.anthropic import response as anthropic_response, routes as anthropic_routes
from lightserve.httpserver.audio import routes as audio_routes
from lightserve.httpserver.batches import routes as batches_routes
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate import routes as generate_routes
from lightserve.httpserver.http.body import with_schemas
from lightserve.httpserver.http.direct_route import serve_directly
from lightserve.httpserver.http.errors import OPENAPI_ERRORS, add_error_handlers
from lightserve.httpserver.http.middleware import RequestMiddleware, allowed_hosts
from lightserve.httpserver.http.paths import RootPath
from lightserve.httpserver.ollama import response as ollama_response, routes as ollama_routes
from lightserve.httpserver.openai import chat_routes, completions_routes
from lightserve.httpserver.openai.responses import routes as responses_routes
from lightserve.httpserver.pooling import routes as pooling_routes
from lightserve.httpserver.pooling.task_guard import refusing
from lightserve.httpserver.resume.local import LocalStreams
from lightserve.httpserver.resume.local_middleware import LocalStreamsMiddleware
from lightserve.httpserver.resume.middleware import StreamLogMiddleware
from lightserve.httpserver.rl import routes as rl_routes
from lightserve.httpserver.rl.calls import paths_of
from lightserve.httpserver.tracing.request_trace import TraceMiddleware
from lightserve.httpserver.web import routes as web_routes

# the framework tries routes in this order, so the most used come first
ROUTE_MODULES = (
    chat_routes,
    completions_routes,
    responses_routes,
    anthropic_routes,
    ollama_routes,
    generate_routes,
    rl_routes,
    pooling_routes,
    tokenize_routes,
    admin_routes,
    batches_routes,
    audio_routes,
    web_routes,
)
BATCHED_ROUTES = (chat_routes, completions_routes, responses_routes, anthropic_routes, pooling_routes)
# of the APIs whose errors are not in the default format
ERROR_FORMATS = (anthropic_response.ERROR_FORMAT, ollama_response.ERROR_FORMAT)


class App(FastAPI):
    """Makes the schemas of bodies for the first /openapi.json: they would be a quarter second of every start."""

    def openapi(self) -> dict[str, Any]:
        for route in self.routes:
            if isinstance(route, APIRoute) and route.openapi_extra:
                route.openapi_extra = with_schemas(route.openapi_extra)
        return super().openapi()


def build_app(context: ServerContext) -> FastAPI:
    app = App(
        title="LightServe",
        version=__version__,
        docs_url=None,  # of the framework, from a CDN; web/ has its own
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the host that the client sends
    )
    of_trainers = rl_routes.admin_routes(context)
    context.keys.more_admin_paths = paths_of(of_trainers)
    _add_routes(app, context, ROUTE_MODULES, of_trainers.routes)
    add_error_handlers(app, ERROR_FORMATS)
    _add_middleware(app, context)
    return app


def build_batch_app(context: ServerContext) -> FastAPI:
    """The routes that lines of batches use, without middleware: a line has no host, no key and no connection.

    Responses are not stored: a client finds them in the files of the batch.
    """
    app = App()
    without_store = replace(context, config=replace(context.config, response_store_size=0))
    _add_routes(app, without_store, BATCHED_ROUTES)
    add_error_handlers(app, ERROR_FORMATS)
    return app


def _add_routes(
    app: FastAPI, context: ServerContext, modules: Sequence[ModuleType], others: Sequence[BaseRoute] = ()
) -> None:
    """Add routes to the app's own table: with include_router an empty request takes 74-147 us, not 51-94."""
    routes = [route for module in modules for route in module.routes(context).routes] + list(others)
    if context.pooling is not None:
        routes = [refusing(route, context.pooling) for route in routes]
    for route in routes:
        if isinstance(route, APIRoute):
            route.responses = OPENAPI_ERRORS | route.responses
            serve_directly(route)
    app.router.routes[:0] = routes  # before the route of /openapi.json


def _add_middleware(app: FastAPI, context: ServerContext) -> None:
    """The last one added is the outermost: CORS answers a preflight without a key, and a page can read an error."""
    if context.stream_log is not None:
        app.add_middleware(
            StreamLogMiddleware, stream_log=context.stream_log, logs_requests=not context.config.disable_log_requests
        )
    elif context.run_dir is not None:
        streams = LocalStreams(Path(context.run_dir), context.config.stream_log_ttl)
        app.add_middleware(LocalStreamsMiddleware, streams=streams)
    app.add_middleware(
        RequestMiddleware,
        keys=context.keys,
        error_formats=ERROR_FORMATS,
        is_public=web_routes.is_public(context.has_chat),
        logs_refusals=not context.config.disable_log_requests,
        hosts=allowed_hosts(context.config.host, context.config.allowed_hosts),
    )
    if context.export_trace is not None:
        paths = [route.path for route in app.routes if isinstance(route, APIRoute)]
        app.add_middleware(TraceMiddleware, model=context.model_name, export=context.export_trace, paths=paths)
    if context.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "Warning"],
        )
    if context.config.root_path:
        app.add_middleware(RootPath, root_path=context.config.root_path)
