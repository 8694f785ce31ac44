"""Which endpoint a client may have meant by a path that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

NOT_SUPPORTED = "not supported"  # tag of routes that refuse every request: they are never suggested
CUTOFF = 0.75  # similarity: 1 for the same path; /chat/completions has 0.92, /complete 0.67
MAX_LENGTH = 100  # characters of a path; comparing takes quadratic time


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
    return longer[0] if len(longer) == 1 else None
