"""Scores of pairs of texts: by a model that reads both, or by the cosine of two embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.pooling.engine import PoolingEngine
from lightserve.messages.params import SchedulingParams
from lightserve.model_files.pooling.results import cosine, pair_score


@dataclass(frozen=True, slots=True)
class PairOptions:
    truncation: int | None = None  # as truncate_prompt_tokens
    instruction: str | None = None
    is_raw: bool = False  # the number before the sigmoid
    is_probability: bool = False  # a sigmoid even for a regression, as in TEI
    scheduling: SchedulingParams | None = None


async def score_pairs(
    engine: PoolingEngine, request: Request, pairs: Sequence[tuple[str, str]], log: AccessLog, options: PairOptions
) -> list[float]:
    """One score for each pair of a query and a document."""
    if engine.config.task == "embed":
        return await _by_cosine(engine, request, pairs, log, options)
    if not engine.config.is_pair_scorer:
        raise InvalidRequestError(f"the model has {engine.config.size} labels; scores need one, so use /classify")
    texts = (engine.encode_pair(*pair, options.truncation, options.instruction) for pair in pairs)
    vectors = await engine.run(request, texts, log, options.scheduling)
    config = replace(engine.config, is_regression=False) if options.is_probability else engine.config
    return [pair_score(config, vector, options.is_raw) for vector in vectors]


async def _by_cosine(
    engine: PoolingEngine, request: Request, pairs: Sequence[tuple[str, str]], log: AccessLog, options: PairOptions
) -> list[float]:
    if options.instruction is not None:
        raise InvalidRequestError("instruction: only a model that answers yes or no reads it", "instruction")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # a query occurs in many pairs
    encoded = (engine.encode(text, options.truncation) for text in texts)
    vectors = dict(zip(texts, await engine.run(request, encoded, log, options.scheduling), strict=True))
    return [cosine(vectors[first], vectors[second]) for first, second in pairs]
