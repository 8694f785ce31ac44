"""What the routes that generate have in common, whatever the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lightserve.beam_search import BeamParams
from lightserve.errors import InvalidRequestError
from lightserve.httpserver.access_log import AccessLog
from lightserve.httpserver.beam import beam_answers
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.manager import Ask, Generation
from lightserve.httpserver.openai_logprobs import NEVER
from lightserve.io_struct import StrOut

MAX_STOP_LENGTH = 1024  # characters


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request that wants text."""

    context: ServerContext
    request: Request
    log: AccessLog
    streams: bool | None  # None: ``stream`` in the body says

    def generate(self, ask: Ask, n: int = 1) -> Generation:
        return self.context.manager.generate([ask], self.log, n)

    async def rows(self, ask: Ask, n: int) -> list[list[StrOut]]:
        """All tokens of ``n`` answers."""
        rows: list[list[StrOut]] = [[] for _ in range(n)]
        async with self.generate(ask, n) as generation:
            async for news in generation:
                for index, out in news:
                    rows[index].append(out)
        return rows

    async def beams(self, ask: Ask, params: BeamParams) -> list[list[StrOut]]:
        """All tokens of the answers that a beam search finds."""
        return await beam_answers(self.context, [ask], params, self.log)


def check_prompt(context: ServerContext, ids: Sequence[int]) -> None:
    if not ids:
        raise InvalidRequestError("`inputs` cannot be empty", "inputs")
    context.manager.check_ids("inputs", ids)


def check_stops(name: str, stops: Sequence[str]) -> None:
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequestError(f"`{name}`: a stop string must have 1..{MAX_STOP_LENGTH} characters", name)


def text_of(rows: Sequence[StrOut]) -> str:
    return "".join([row.text for row in rows])


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, NEVER)


def logprob_json(logprob: float | None) -> bytes:
    if logprob is None:
        return b"null"
    return orjson.dumps(logprob if logprob > NEVER else NEVER)  # max() takes 0.2 us longer


def mean_logprob(rows: Sequence[StrOut]) -> float:
    return sum(row.token.logprob or 0.0 for row in rows) / len(rows)


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
