"""Values of a request as JSON in the prompt."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson

from lightserve.errors import InvalidRequestError


def json_text(value: Any, param: str, hidden: Collection[str] = ()) -> str:
    """``value`` as JSON, without the ``hidden`` fields of its objects. ``param`` is the field of the request."""
    try:
        return orjson.dumps(_without(value, hidden) if hidden else value).decode()
    except (TypeError, RecursionError) as error:  # a body may have 1,024 levels, and orjson writes 254
        raise InvalidRequestError(f"{param}: a value is nested too deeply to be shown to the model", param) from error


def _without(value: Any, hidden: Collection[str]) -> Any:
    if isinstance(value, list):
        return [_without(item, hidden) for item in value]
    if isinstance(value, dict):
        return {name: _without(item, hidden) for name, item in value.items() if name not in hidden}
    return value
