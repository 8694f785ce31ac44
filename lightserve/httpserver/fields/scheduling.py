"""The fields of a body that say how the router schedules its request."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any

from pydantic import Field

from lightserve.httpserver.http.body import Body
from lightserve.messages.params import SchedulingParams


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
