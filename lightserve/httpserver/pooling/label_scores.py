"""SGLang's /v1/score: how probable some label tokens are after a query and each of its items.

An engine request gives one number: the log probability of a label, which is the only token that it may generate.
Those of an item share its prompt in the prefix cache, so that each label after the first costs one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.body import json_response
from lightserve.httpserver.http.sse import until_disconnect
from lightserve.httpserver.pooling.bodies import LabelScoreBody
from lightserve.httpserver.pooling.engine import GROUP, PoolingEngine
from lightserve.messages.output import StrOut
from lightserve.messages.params import GenerationParams, SchedulingParams
from lightserve.model_files.pooling.results import Vector

MAX_SCORES = 8192  # items times labels
ONE_TOKEN = GenerationParams.of(max_new_tokens=1, temperature=0.0, logprobs=0)


async def label_scores(
    context: ServerContext, engine: PoolingEngine, request: Request, body: LabelScoreBody
) -> Response:
    context.check_model(body.model)
    log = context.log(request)
    if context.pooling is None:
        logits = await _label_logprobs(context, request, body, log)
    else:
        logits = await _class_logits(engine, request, body, log)
    if body.apply_softmax:
        scores = [_softmax(row) for row in logits]
    else:
        scores = [np.exp(row) for row in logits] if context.pooling is None else logits
    usage = {"prompt_tokens": log.prompt_tokens, "total_tokens": log.prompt_tokens, "completion_tokens": 0}
    return json_response(
        {
            "scores": [row.tolist() for row in scores],
            "model": context.shown_model(body.model),
            "usage": usage,
            "object": "scoring",
        }
    )


async def _class_logits(engine: PoolingEngine, request: Request, body: LabelScoreBody, log: AccessLog) -> list[Vector]:
    """The numbers of a classifier, which has its own labels, before any softmax or sigmoid."""
    engine.require("a score of items", "classify", "score", "reward")
    engine.count_numbers(body.items, name="items")
    texts = (engine.encode(prompt, None, name="items") for prompt in body.prompts())
    return await engine.run(request, texts, log, body.scheduling)


async def _label_logprobs(
    context: ServerContext, request: Request, body: LabelScoreBody, log: AccessLog
) -> list[Vector]:
    """For each item, the log probability of each label among all tokens."""
    labels = _labels(context, body)
    for name, given in (("query", [body.query]), ("items", body.items)):
        for ids in given:
            context.manager.check_ids(name, ids if isinstance(ids, list) else [])
    prompts = [await _prompt_ids(context, prompt) for prompt in body.prompts()]
    log.prompt_tokens, log.counts_output = sum(map(len, prompts)), False
    scheduling = structs.replace(body.scheduling, lora=context.adapter_of(body.model))
    logprobs = await until_disconnect(request, _run(context, prompts, labels, scheduling, log))
    return list(np.array(logprobs).reshape(len(prompts), len(labels)))


def _labels(context: ServerContext, body: LabelScoreBody) -> list[int]:
    labels = body.label_token_ids
    if labels is None:
        raise InvalidRequestError(
            "label_token_ids: a model that generates text needs the ids of the tokens to score", "label_token_ids"
        )
    context.manager.check_ids("label_token_ids", labels)
    if len(labels) * len(body.items) > MAX_SCORES:
        size = f"{len(body.items)} items with {len(labels)} labels are {len(labels) * len(body.items):,} scores"
        raise InvalidRequestError(f"items: {size}; the limit is {MAX_SCORES:,} in one request", "items")
    return labels


async def _prompt_ids(context: ServerContext, prompt: str | list[int]) -> list[int]:
    ids = prompt if isinstance(prompt, list) else await context.encode(prompt)
    context.manager.max_new_tokens(len(ids), 1)  # refuses a prompt that is too long
    return ids


async def _run(
    context: ServerContext,
    prompts: Sequence[list[int]],
    labels: Sequence[int],
    scheduling: SchedulingParams,
    log: AccessLog,
) -> list[float]:
    """The log probability of every label after every prompt. It writes one log line."""
    pairs = [(ids, label) for ids in prompts for label in labels]
    outs: list[StrOut] = []
    try:
        for begin in range(0, len(pairs), GROUP):
            group_log = log.silent_copy()
            group = [
                PromptRequest(ids, ONE_TOKEN.replace(allowed_token_ids=(label,)), scheduling)
                for ids, label in pairs[begin : begin + GROUP]
            ]
            outs += [out for (out,) in await context.manager.generate(group, group_log).collect()]
            log.add(group_log)
        firsts = outs[:: len(labels)]  # the other labels of an item find its whole prompt
        log.cached_tokens = sum(out.admission.cached_tokens for out in firsts if out.admission is not None)
    except BaseException as error:
        log.close(error)
        raise
    log.close(None)
    return [-np.inf if out.token.logprob is None else out.token.logprob for out in outs]


def _softmax(logits: Vector) -> Vector:
    weights = np.exp(logits - logits.max())
    shares: Vector = weights / weights.sum()
    return shares
