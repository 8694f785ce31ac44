"""Stop strings of request bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lightserve.errors import InvalidRequestError

MAX_STOP_STRINGS = 16  # OpenAI takes 4
MAX_STOP_LENGTH = 1024  # characters; the detokenizer holds back at most that much text

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None,
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString] | None),
]


def check_stop_strings(field: str, stops: Sequence[str]) -> None:
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(f"`{field}`: a stop string must have 1..{MAX_STOP_LENGTH} characters", field)
