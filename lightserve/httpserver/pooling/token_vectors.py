"""A vector for each token of a text, and the scores of late interaction from them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.pooling.bodies import PoolingBody
from lightserve.httpserver.pooling.engine import PairOptions, PoolingEngine, TokenIds
from lightserve.httpserver.pooling.response import MAX_NUMBERS
from lightserve.messages.params import SchedulingParams
from lightserve.model_files.pooling.results import Vector, max_sim, token_vectors
from lightserve.model_files.pooling.texts import InputType


async def vectors_of_inputs(engine: PoolingEngine, request: Request, body: PoolingBody, log: AccessLog) -> list[Vector]:
    """``[tokens, size]`` for each input. Token ids are computed as they are, and all of them have vectors."""
    input_type: InputType = body.input_type or "document"
    encoded = [await engine.encode_for_tokens(item, body.truncate_prompt_tokens, input_type) for item in body.input]
    size = engine.config.size
    if (numbers := sum(map(len, encoded)) * size) > MAX_NUMBERS:
        raise InvalidRequestError(
            f"input: {numbers // size:,} vectors of {size} numbers each are more than {MAX_NUMBERS:,} numbers; "
            "send fewer inputs at once",
            "input",
        )

    def vectors(index: int, ids: TokenIds, values: Vector) -> Vector:
        of_tokens = token_vectors(values, size)
        if isinstance(body.input[index], list):
            return of_tokens
        return of_tokens[engine.texts.have_vectors(ids, input_type)]

    return await engine.run_and_convert(request, map(_ready, encoded), log, body.scheduling, vectors)


async def score_by_max_sim(
    engine: PoolingEngine, request: Request, pairs: Sequence[tuple[str, str]], log: AccessLog, options: PairOptions
) -> list[float]:
    """The vectors of a document are dropped as soon as its scores are known."""
    queries = list(dict.fromkeys(query for query, _ in pairs))
    documents = list(dict.fromkeys(document for _, document in pairs))
    pairs_of: dict[str, list[int]] = {}
    for index, (_, document) in enumerate(pairs):
        pairs_of.setdefault(document, []).append(index)
    of_queries: dict[str, Vector] = {}
    scores = [0.0] * len(pairs)

    def add(index: int, ids: TokenIds, values: Vector) -> None:
        of_tokens = token_vectors(values, engine.config.size)
        if index < len(queries):
            of_queries[queries[index]] = of_tokens
            return
        document = documents[index - len(queries)]
        of_document = of_tokens[engine.texts.have_vectors(ids, "document")]
        for pair in pairs_of[document]:
            scores[pair] = max_sim(of_queries[pairs[pair][0]], of_document)

    kinds: list[tuple[InputType, list[str]]] = [("query", queries), ("document", documents)]
    texts = (engine.encode_for_tokens(text, options.truncation, kind) for kind, many in kinds for text in many)
    await engine.run_and_convert(request, texts, log, options.scheduling or SchedulingParams(), add)
    return scores


async def _ready(ids: list[int]) -> list[int]:
    return ids
