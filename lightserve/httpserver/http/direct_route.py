"""Routes without the framework's work for parameters: most handlers of this server read the request themselves."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]


def serve_directly(route: APIRoute) -> None:
    """Call the handler with the request, if it takes nothing else. What /openapi.json says of the route stays.

    Errors of the handler reach the same handlers of errors, in the application's middleware.
    """
    signature = inspect.signature(route.endpoint)
    if [*signature.parameters] == ["request"] and str(signature.return_annotation).endswith("Response"):
        route.app = partial(_serve, route.endpoint)


async def _serve(handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
    response = await handler(Request(scope, receive, send))
    await response(scope, receive, send)
