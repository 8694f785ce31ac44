"""Ollama's embeddings: /api/embed, and the older /api/embeddings with one prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.http.body import Body, json_response, openapi_body
from lightserve.httpserver.ollama.models import check_name
from lightserve.httpserver.ollama.response import PATH
from lightserve.httpserver.pooling.engine import PoolingEngine
from lightserve.messages.params import SchedulingParams
from lightserve.model_files.pooling.results import Vector, embedding

MAX_INPUTS = 2048
TO_THE_END = -1  # as many tokens as the model takes


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Inputs = Annotated[
    Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]


class EmbedOptions(Body):
    model: str | None = None
    options: dict[str, Any] | None = None  # of sampling
    keep_alive: Any = None  # the model stays loaded


class EmbedBody(EmbedOptions):
    input: Inputs
    truncate: bool | None = None  # default: true
    dimensions: Annotated[int, Field(ge=1)] | None = None


class EmbeddingsBody(EmbedOptions):
    prompt: str


def add_embed_routes(router: APIRouter, context: ServerContext) -> None:
    engine = PoolingEngine(context)

    async def vectors_of(request: Request, texts: Sequence[str], truncation: int | None) -> tuple[list[Vector], int]:
        """And the number of prompt tokens."""
        encoded = (engine.encode(text, truncation) for text in texts)
        log = context.log(request)
        return list(await engine.run(request, encoded, log, SchedulingParams())), log.prompt_tokens

    @router.post(f"{PATH}/embed", openapi_extra=openapi_body(EmbedBody))
    async def embed(request: Request) -> Response:
        """A vector of length 1 for each input."""
        began_ns = time.monotonic_ns()
        body = await context.read_body(request, EmbedBody)
        name = check_name(context, body.model)
        engine.require("an embedding", "embed")
        engine.count_numbers(body.input, body.dimensions)
        vectors, tokens = await vectors_of(request, body.input, None if body.truncate is False else TO_THE_END)
        return json_response(
            {
                "model": name,
                "embeddings": [embedding(vector, body.dimensions).tolist() for vector in vectors],
                "total_duration": time.monotonic_ns() - began_ns,
                "load_duration": 0,
                "prompt_eval_count": tokens,
            }
        )

    @router.post(f"{PATH}/embeddings", openapi_extra=openapi_body(EmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        """The older form: the vector of one prompt, as the model computes it."""
        body = await context.read_body(request, EmbeddingsBody)
        check_name(context, body.model)
        engine.require("an embedding", "embed")
        vectors, _ = await vectors_of(request, [body.prompt], TO_THE_END)
        return json_response({"embedding": embedding(vectors[0], normalize=False).tolist()})
