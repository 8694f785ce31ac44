"""How well documents answer queries, by whatever the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.pooling.engine import PairOptions, PoolingEngine
from lightserve.httpserver.pooling.token_vectors import score_by_max_sim
from lightserve.model_files.pooling.results import cosine, pair_score


async def score_pairs(
    engine: PoolingEngine, request: Request, pairs: Sequence[tuple[str, str]], log: AccessLog, options: PairOptions
) -> list[float]:
    """One score for each pair of a query and a document."""
    config = engine.config
    if options.instruction is not None and config.task in ("embed", "token_embed"):
        raise InvalidRequestError("instruction: only a model with a score template reads it", "instruction")
    if config.task == "embed":
        return await _by_cosine(engine, request, pairs, log, options)
    if config.task == "token_embed":
        return await score_by_max_sim(engine, request, pairs, log, options)
    if not config.is_pair_scorer:
        raise InvalidRequestError(f"the model has {config.size} labels; scores need one, so use /classify")
    texts = (engine.encode_pair(*pair, options.truncation, options.instruction) for pair in pairs)
    vectors = await engine.run(request, texts, log, options.scheduling)
    config = replace(config, is_regression=False) if options.is_probability else config
    return [pair_score(config, vector, options.is_raw) for vector in vectors]


async def _by_cosine(
    engine: PoolingEngine, request: Request, pairs: Sequence[tuple[str, str]], log: AccessLog, options: PairOptions
) -> list[float]:
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # a query occurs in many pairs
    encoded = (engine.encode(text, options.truncation) for text in texts)
    vectors = dict(zip(texts, await engine.run(request, encoded, log, options.scheduling), strict=True))
    return [cosine(vectors[first], vectors[second]) for first, second in pairs]
