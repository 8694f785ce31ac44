"""Fields that the bodies of several APIs share: how the request is scheduled, its stop strings and its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lightserve.errors import InvalidRequestError, TextOnlyError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body
from lightserve.messages.params import SchedulingParams

MAX_STOP_STRINGS = 16  # OpenAI takes 4
MAX_STOP_LENGTH = 1024  # characters; the detokenizer holds back at most that much text

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class SchedulingFields(Body):
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower goes first
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None  # seconds from arrival to the last token
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # prefixes are shared within a salt
    extra_key: Annotated[str, Field(max_length=256)] | None = None  # SGLang's, besides the salt
    disable_prompt_cache: bool | None = None  # do not share prefixes
    # names of a conversation, vLLM's and OpenAI's: any value, because a server with one engine needs none of them
    session_id: Any = None
    prompt_cache_key: Any = None

    @property
    def scheduling(self) -> SchedulingParams:
        return SchedulingParams(
            priority=self.priority or 0,
            timeout_s=self.timeout,
            cache_salt="\0".join(filter(None, (self.cache_salt, self.extra_key))),
            use_cache=not self.disable_prompt_cache,
            session=_session_key(self.session_id or self.prompt_cache_key),
        )


class PromptFields(SchedulingFields):
    """Of requests that generate text."""

    task_id: Annotated[str, Field(min_length=1, max_length=256)] | int | None = None  # RTP-LLM's: a pinned prefix


def _session_key(name: Any) -> str:
    """The same for the same name, and short."""
    return blake2b(str(name).encode(errors="replace"), digest_size=8).hexdigest() if name else ""


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


def check_input_ids(context: ServerContext, ids: Sequence[int]) -> None:
    if not ids:
        raise InvalidRequestError("`inputs` cannot be empty", "inputs")
    context.manager.check_ids("inputs", ids)


def refuse_media(params: Mapping[str, Any] | None) -> None:
    """``multimodal_params`` holds lists of images and the like, which may be empty."""
    for kind, items in (params or {}).items():
        if items:
            raise TextOnlyError(f"`multimodal_params.{kind[:100]}`", "multimodal_params")
