"""The path of a request's route, with and without a reverse proxy."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


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
