"""/v1/embeddings, /classify, /pooling, /score, /rerank and /get_score, for models that compute no text."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError, LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.fields.shared import refuse_media
from lightserve.httpserver.generate.tgi.errors import tgi_error_response
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import json_response, openapi_body, validate
from lightserve.httpserver.pooling.bodies import (
    EmbeddingsBody,
    GetScoreBody,
    InputBody,
    LabelScoreBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TeiRerankBody,
)
from lightserve.httpserver.pooling.engine import PairOptions, PoolingEngine
from lightserve.httpserver.pooling.label_scores import label_scores
from lightserve.httpserver.pooling.pairs import score_pairs
from lightserve.httpserver.pooling.response import list_response
from lightserve.httpserver.pooling.tei import add_tei_routes, tei_rerank
from lightserve.httpserver.pooling.token_vectors import vectors_of_inputs
from lightserve.model_files.pooling.results import Vector, embedding, probabilities

Inputs = TypeVar("Inputs", bound=InputBody)
COHERE_PATH = "/v2/rerank"


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["pooling"])
    engine = PoolingEngine(context)
    _add_embeddings(router, context, engine)
    _add_inputs(router, context, engine)
    _add_pairs(router, context, engine)
    _add_get_score(router, context, engine)
    add_tei_routes(router, context, engine)
    return router


def _add_embeddings(router: APIRouter, context: ServerContext, engine: PoolingEngine) -> None:
    @router.post("/v1/embeddings", openapi_extra=openapi_body(EmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        """OpenAI's: a vector for each input."""
        body = await context.read_body(request, EmbeddingsBody)
        context.check_model(body.model)
        engine.require("an embedding", "embed")
        numbers = engine.count_numbers(body.input, body.dimensions)
        normalizes = body.normalize is not False
        texts = (engine.encode(item, body.truncate_prompt_tokens, body.prompt_name) for item in body.input)
        log = context.log(request)
        vectors = await engine.run(request, texts, log, body.scheduling)
        write = _as_base64 if body.encoding_format == "base64" else _as_it_is
        data = (
            {"object": "embedding", "index": i, "embedding": write(embedding(vector, body.dimensions, normalizes))}
            for i, vector in enumerate(vectors)
        )
        fields = {"object": "list", "model": context.model_name, "usage": _usage(log)}
        return list_response(data, numbers, fields)


def _add_inputs(router: APIRouter, context: ServerContext, engine: PoolingEngine) -> None:
    @router.post("/classify", openapi_extra=openapi_body(InputBody))
    async def classify(request: Request) -> Response:
        """vLLM's: the probabilities of the labels, for each input."""
        body, log = await _read_inputs(context, request, InputBody)
        engine.require("a classification", "classify", "score")
        vectors = await _run_inputs(engine, request, body, log)
        config = engine.config
        data = (_classified(i, probabilities(config, vector), config.labels) for i, vector in enumerate(vectors))
        return list_response(data, len(vectors) * config.size, _list_fields(context, log, "classify"))

    @router.post("/pooling", openapi_extra=openapi_body(PoolingBody))
    async def pooling(request: Request) -> Response:
        """vLLM's: the numbers that the model computes for each input, as they are; or a vector for each token."""
        body, log = await _read_inputs(context, request, PoolingBody)
        _check_pooling(engine, body)
        if engine.config.task == "token_embed":
            vectors = await vectors_of_inputs(engine, request, body, log)
        else:
            vectors = await _run_inputs(engine, request, body, log)
        data = ({"index": i, "object": "pooling", "data": vector} for i, vector in enumerate(vectors))
        return list_response(data, sum(vector.size for vector in vectors), _list_fields(context, log, "pool"))


def _add_pairs(router: APIRouter, context: ServerContext, engine: PoolingEngine) -> None:
    @router.post("/score", openapi_extra=openapi_body(ScoreBody))
    async def score(request: Request) -> Response:
        """vLLM's: a score for each pair of text_1 and text_2."""
        return await _score(context, engine, request, await context.read(request))

    @router.post("/v1/score", openapi_extra=openapi_body(ScoreBody, LabelScoreBody))
    async def score_either(request: Request) -> Response:
        """As /score, or SGLang's if the body has ``items``."""
        value = await context.read(request)
        if "items" not in value:
            return await _score(context, engine, request, value)
        body = validate(LabelScoreBody, value)
        context.check_fields(request, body)
        return await label_scores(context, engine, request, body)

    @router.post("/v1/rerank", openapi_extra=openapi_body(RerankBody))
    @router.post(COHERE_PATH, openapi_extra=openapi_body(RerankBody))
    async def rerank(request: Request) -> Response:
        """Jina's, Cohere's and vLLM's: the documents, those that answer the query best first."""
        return await _rerank(context, engine, request, await context.read(request))

    @router.post("/rerank", openapi_extra=openapi_body(RerankBody, TeiRerankBody))
    async def plain_rerank(request: Request) -> Response:
        """As /v1/rerank, or TEI's if the body has ``texts``."""
        value = await context.read(request)
        if "texts" not in value:
            return await _rerank(context, engine, request, value)
        try:
            return await tei_rerank(context, engine, request, value)
        except LightserveError as error:
            return tgi_error_response(error, request)


def _add_get_score(router: APIRouter, context: ServerContext, engine: PoolingEngine) -> None:
    @router.post("/get_score", openapi_extra=openapi_body(GetScoreBody))
    async def get_score(request: Request) -> Response:
        """LightLLM's: the number that a reward model gives to a chat."""
        body = await context.read_body(request, GetScoreBody)
        refuse_media(body.multimodal_params)
        engine.require("a reward", "reward", "classify", "score")
        if engine.config.size != 1:
            raise InvalidRequestError(f"the model has {engine.config.size} labels; a reward has one, so use /classify")
        log = context.log(request)
        (vector,) = await engine.run(request, [_chat_ids(context, engine, body.chat)], log)
        return json_response({"score": float(vector[0]), "prompt_tokens": log.prompt_tokens, "finish_reason": "stop"})


async def _chat_ids(context: ServerContext, engine: PoolingEngine, chat: str | list[dict[str, Any]]) -> list[int]:
    if isinstance(chat, str):
        return await engine.encode(chat, None)
    if not chat or not all(isinstance(message.get("content"), str) for message in chat):
        raise InvalidRequestError("chat: a text, or messages with a role and a content that is a text", "chat")
    text = await asyncio.to_thread(context.tokenizer.apply_chat_template, chat, add_generation_prompt=False)
    return await engine.encode(await context.encode(text, add_special_tokens=False), None)


async def _score(context: ServerContext, engine: PoolingEngine, request: Request, value: dict[str, Any]) -> Response:
    body = validate(ScoreBody, value)
    context.check_fields(request, body)
    context.check_model(body.model)
    log = context.log(request)
    options = PairOptions(body.truncate_prompt_tokens, body.instruction, scheduling=body.scheduling)
    scores = await score_pairs(engine, request, _pairs(body), log, options)
    data = ({"index": i, "object": "score", "score": value} for i, value in enumerate(scores))
    return list_response(data, len(scores), _list_fields(context, log, "score"))


async def _rerank(context: ServerContext, engine: PoolingEngine, request: Request, value: dict[str, Any]) -> Response:
    body = validate(RerankBody, value)
    context.check_fields(request, body)
    context.check_model(body.model)
    log = context.log(request)
    options = PairOptions(body.truncate_prompt_tokens, body.instruction, scheduling=body.scheduling)
    scores = await score_pairs(engine, request, [(body.query, document) for document in body.documents], log, options)
    is_cohere = request.scope["path"].endswith(COHERE_PATH)
    shows_documents = not is_cohere if body.return_documents is None else body.return_documents
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    results = [
        {"index": i, **({"document": {"text": body.documents[i]}} if shows_documents else {})}
        | {"relevance_score": scores[i]}
        for i in order
    ]
    return json_response(
        {"id": f"rerank-{log.request_id}", "model": context.model_name, "usage": _usage(log), "results": results}
    )


def _check_pooling(engine: PoolingEngine, body: PoolingBody) -> None:
    task = engine.config.task
    if body.task not in (None, task):
        raise InvalidRequestError(f"task is {body.task!r}; the task of this model is {task} (--task)", "task")
    if body.input_type is not None and task != "token_embed":
        raise InvalidRequestError(f"input_type: the task of this model is {task}, not token_embed", "input_type")


async def _read_inputs(context: ServerContext, request: Request, kind: type[Inputs]) -> tuple[Inputs, AccessLog]:
    body = await context.read_body(request, kind)
    context.check_model(body.model)
    return body, context.log(request)


async def _run_inputs(engine: PoolingEngine, request: Request, body: InputBody, log: AccessLog) -> list[Vector]:
    engine.count_numbers(body.input)
    texts = (engine.encode(item, body.truncate_prompt_tokens) for item in body.input)
    return await engine.run(request, texts, log, body.scheduling)


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """One text_1 goes with every text_2."""
    first, second = body.text_1, body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"text_1 has {len(first)} texts, text_2 {len(second)}; give one, or as many", "text_1"
        )
    return list(zip(first, second, strict=True))


def _as_base64(vector: Vector) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _as_it_is(vector: Vector) -> Vector:
    return vector


def _classified(index: int, shares: Vector, labels: Sequence[str]) -> dict[str, Any]:
    best = int(shares.argmax())
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": shares, "num_classes": len(shares)}


def _list_fields(context: ServerContext, log: AccessLog, prefix: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{log.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": context.model_name,
        "usage": _usage(log),
    }


def _usage(log: AccessLog) -> dict[str, Any]:
    details = {"cached_tokens": log.cached_tokens}
    return {
        "prompt_tokens": log.prompt_tokens,
        "total_tokens": log.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": details,
    }
