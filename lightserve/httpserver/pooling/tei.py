"""The endpoints of text-embeddings-inference: /embed, /rerank and /predict. Errors have its format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import LightserveError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.generate.tgi.errors import tgi_error_response
from lightserve.httpserver.http.body import json_response, openapi_body, validate
from lightserve.httpserver.pooling.bodies import TeiEmbedBody, TeiPredictBody, TeiRerankBody
from lightserve.httpserver.pooling.engine import PairOptions, PoolingEngine
from lightserve.httpserver.pooling.pairs import score_pairs
from lightserve.httpserver.pooling.response import list_response
from lightserve.model_files.pooling.results import Vector, embedding, probabilities

Answer = Callable[[ServerContext, PoolingEngine, Request, dict[str, Any]], Awaitable[Response]]


def add_tei_routes(router: APIRouter, context: ServerContext, engine: PoolingEngine) -> None:
    @router.post("/embed", openapi_extra=openapi_body(TeiEmbedBody))
    async def embed(request: Request) -> Response:
        """A vector for each input."""
        return await _answer(_embed, context, engine, request)

    @router.post("/predict", openapi_extra=openapi_body(TeiPredictBody))
    async def predict(request: Request) -> Response:
        """The labels of each text or pair of texts, the most likely first."""
        return await _answer(_predict, context, engine, request)


async def _answer(answer: Answer, context: ServerContext, engine: PoolingEngine, request: Request) -> Response:
    value = await context.read(request)
    try:
        return await answer(context, engine, request, value)
    except LightserveError as error:
        return tgi_error_response(error, request)


async def _embed(context: ServerContext, engine: PoolingEngine, request: Request, value: dict[str, Any]) -> Response:
    body = validate(TeiEmbedBody, value)
    context.check_fields(request, body)
    engine.require("an embedding", "embed")
    numbers = engine.count_numbers(body.inputs, body.dimensions, "inputs")
    texts = (engine.encode(item, body.length, body.prompt_name, "inputs") for item in body.inputs)
    vectors = await engine.run(request, texts, context.log(request), body.scheduling)
    return list_response(
        (embedding(vector, body.dimensions, body.normalize is not False) for vector in vectors), numbers
    )


async def tei_rerank(
    context: ServerContext, engine: PoolingEngine, request: Request, value: dict[str, Any]
) -> Response:
    body = validate(TeiRerankBody, value)
    context.check_fields(request, body)
    options = PairOptions(body.length, is_raw=bool(body.raw_scores), is_probability=True, scheduling=body.scheduling)
    pairs = [(body.query, text) for text in body.texts]
    scores = await score_pairs(engine, request, pairs, context.log(request), options)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    shown = [{"text": text} if body.return_text else {} for text in body.texts]
    return json_response([{"index": i, "score": scores[i], **shown[i]} for i in order])


async def _predict(context: ServerContext, engine: PoolingEngine, request: Request, value: dict[str, Any]) -> Response:
    body = validate(TeiPredictBody, value)
    context.check_fields(request, body)
    engine.require("a prediction", "classify", "score")
    is_single, inputs = body.inputs
    numbers = engine.count_numbers(inputs, name="inputs")
    texts = (
        engine.encode_pair(item[0], item[1], body.length) if len(item) == 2 else engine.encode(item[0], body.length)
        for item in inputs
    )
    vectors = await engine.run(request, texts, context.log(request), body.scheduling)
    answers = (_labelled(engine, vector, bool(body.raw_scores)) for vector in vectors)
    return json_response(next(answers)) if is_single else list_response(answers, numbers)


def _labelled(engine: PoolingEngine, vector: Vector, is_raw: bool) -> list[dict[str, Any]]:
    config = replace(engine.config, is_regression=False)  # TEI does not read the activation of config.json
    scores = (vector if is_raw else probabilities(config, vector)).tolist()
    labels = engine.config.labels or tuple(f"LABEL_{i}" for i in range(len(scores)))
    pairs = sorted(zip(scores, labels, strict=True), key=lambda pair: -pair[0])
    return [{"score": score, "label": label} for score, label in pairs]
