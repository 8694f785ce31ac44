"""The path of a request: without --root_path, and the endpoint that a client may have meant by a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

NOT_SUPPORTED = "not supported"  # tag of routes that refuse every request: they are never suggested
CUTOFF = 0.75  # similarity: 1 for the same path; /chat/completions has 0.92, /complete 0.67
MAX_LENGTH = 100  # characters of a path; comparing takes quadratic time


class RootPath:
    """Tells the framework --root_path: routes match with and without it, and /openapi.json names it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path without --root_path, whether or not a proxy has removed it. The framework matches routes the same way.

    Checks of a path must use this one: else /llm/abort_request would not be the admin's path /abort_request.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def suggested_endpoint(routes: Iterable[BaseRoute], method: str, path: str) -> tuple[str, str] | None:
    """Method and path of the nearest endpoint; None: no endpoint is near."""
    if len(path) > MAX_LENGTH:
        return None
    methods: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, APIRoute) and _is_suggested(route):
            methods.setdefault(route.path, set()).update(route.methods or ())
    nearest = _nearest(path, list(methods))
    if nearest is None:
        return None
    return method if method in methods[nearest] else min(methods[nearest]), nearest


def _is_suggested(route: APIRoute) -> bool:
    return route.include_in_schema and "{" not in route.path and route.path != "/" and NOT_SUPPORTED not in route.tags


def _nearest(path: str, known: Sequence[str]) -> str | None:
    plain = "/".join(["", *filter(None, path.lower().split("/"))])
    near = difflib.get_close_matches(plain, known, n=1, cutoff=CUTOFF)
    if near:
        return near[0]
    longer = [candidate for candidate in known if candidate.startswith(f"{plain}/")]
    shortest = min(longer, key=len, default="")
    return shortest if all(f"{path}/".startswith(f"{shortest}/") for path in longer) and longer else None
