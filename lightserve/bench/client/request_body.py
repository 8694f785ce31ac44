"""Bodies of the requests: OpenAI's completions and chat completions, streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from lightserve.bench.client.dataset import Prompt

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What all bodies of a load test have in common."""

    api: str  # a key of PATHS
    model: str
    asks_for_usage: bool = True
    fields: dict[str, Any] = field(default_factory=dict)


def body_of(prompt: Prompt, options: BodyOptions) -> bytes:
    body: dict[str, Any] = {"model": options.model, "max_tokens": prompt.output_len, "stream": True}
    if options.asks_for_usage:
        body["stream_options"] = {"include_usage": True}
    if options.api == "chat":
        body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
    elif prompt.messages:
        raise ValueError("the dataset has messages, and a completion takes a prompt: use --api chat")
    else:
        body["prompt"] = prompt.text
    return orjson.dumps(body | options.fields | prompt.fields)


def bodies_of(prompts: Sequence[Prompt], options: BodyOptions) -> list[bytes]:
    return [body_of(prompt, options) for prompt in prompts]
