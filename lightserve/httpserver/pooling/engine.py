"""From texts to the numbers that the model computes for them: embeddings, classes, and scores of pairs of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from lightserve.errors import InvalidRequestError, TextTooLongError
from lightserve.httpserver.context import LONG_TEXT, ServerContext
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.sse import until_disconnect
from lightserve.httpserver.pooling.response import MAX_NUMBERS
from lightserve.messages.params import GenerationParams, SchedulingParams
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.pooling.results import Vector, vector_of
from lightserve.model_files.pooling.texts import InputType, PoolingTexts

P = ParamSpec("P")
Result = TypeVar("Result")
TokenIds = Sequence[int]
Texts = Iterable[Awaitable[list[int]]]  # their token ids
ONE_RESULT = GenerationParams.of(max_new_tokens=1)
GROUP = 256  # texts of a request that are sent to the engine at once: other requests get their turn between groups


class PoolingEngine:
    """What the pooling endpoints share. ``config`` fails on a server whose model generates text."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._texts: PoolingTexts | None = None

    @property
    def config(self) -> PoolingConfig:
        config = self._context.pooling
        if config is None:
            raise InvalidRequestError(
                "this model generates text and computes no embeddings or scores; set --task embed"
            )
        return config

    @property
    def texts(self) -> PoolingTexts:
        if self._texts is None:
            self._texts = PoolingTexts(self.config, self._context.tokenizer, self._context.manager.limits.vocab_size)
        return self._texts

    def require(self, what: str, *tasks: str) -> None:
        """Refuse a request for which the model has the wrong task."""
        if self.config.task not in tasks:
            raise InvalidRequestError(
                f"{what} needs a model for {' or '.join(tasks)}; the task of this one is {self.config.task} (--task)"
            )

    def count_numbers(self, inputs: Sequence[Any], dimensions: int | None = None, name: str = "input") -> int:
        """All numbers of a response to so many inputs. Refuse a request whose response would be too large."""
        size = self.config.size
        if dimensions is not None and dimensions > size:
            raise InvalidRequestError(f"dimensions is {dimensions}; the model has {size}", "dimensions")
        each = dimensions or size
        most = MAX_NUMBERS // each
        if len(inputs) > most:
            problem = f"{len(inputs)} inputs of {each} numbers each are more than {MAX_NUMBERS:,} numbers"
            raise InvalidRequestError(f"{name}: {problem}; send at most {most} inputs at once", name)
        return len(inputs) * each

    async def encode(
        self, text: str | list[int], truncation: int | None, prompt_name: str | None = None, name: str = "input"
    ) -> list[int]:
        """The token ids of a text. ``truncation`` is truncate_prompt_tokens."""
        if isinstance(text, list):
            self._context.manager.check_ids(name, text)
            return self._fit(text, truncation)
        text = self._cut(text, truncation)
        return self._fit(await _in_thread_if_long(len(text), self.texts.encode, text, prompt_name), truncation)

    async def encode_for_tokens(
        self, text: str | list[int], truncation: int | None, input_type: InputType
    ) -> list[int]:
        """The same for a model with a vector for each token."""
        if isinstance(text, list):
            return await self.encode(text, truncation)
        text = self._cut(text, truncation)
        limit = None if truncation is None else self._limit(truncation)
        return self._fit(
            await _in_thread_if_long(len(text), self.texts.encode_for_tokens, text, input_type, limit), None
        )

    async def encode_pair(
        self, query: str, document: str, truncation: int | None, instruction: str | None = None
    ) -> list[int]:
        query, document = self._cut(query, truncation), self._cut(document, truncation)
        size = len(query) + len(document)
        limit = None if truncation is None else self._limit(truncation)
        ids = await _in_thread_if_long(size, self.texts.encode_pair, query, document, instruction, limit)
        return self._fit(ids, None)

    def _cut(self, text: str, truncation: int | None) -> str:
        """Before encoding: cut a text that is truncated anyway, and refuse one that is much too long."""
        limit = self._context.manager.limits.max_req_total_len
        if truncation is not None:
            return text[: limit * self._context.tokenizer.longest_token]
        if (at_least := self._context.least_tokens(text)) is not None:
            raise TextTooLongError(at_least, limit, is_lower_bound=True)
        return text

    def _fit(self, ids: Sequence[int], truncation: int | None) -> list[int]:
        """Truncate a text to ``truncation`` tokens. Refuse it if it is too long."""
        limit = self._context.manager.limits.max_req_total_len
        if truncation is not None:
            ids = self.texts.truncate(ids, self._limit(truncation))
        if not ids:
            raise InvalidRequestError("the text is empty: it has no tokens", "input")
        if len(ids) > limit:
            raise TextTooLongError(len(ids), limit)
        return list(ids)

    def _limit(self, truncation: int) -> int:
        """Tokens of a truncated text; -1: as many as the model takes."""
        limit = self._context.manager.limits.max_req_total_len
        return limit if truncation == -1 else min(truncation, limit)

    async def run(
        self,
        request: Request,
        texts: Texts,
        log: AccessLog,
        scheduling: SchedulingParams | None = None,
    ) -> list[Vector]:
        """The numbers of every text, in their order. ``texts`` are encoded one by one, until the client disconnects.

        It writes one log line.
        """
        return await until_disconnect(request, self._run(texts, log, scheduling, _as_vectors))

    async def run_and_convert(
        self,
        request: Request,
        texts: Texts,
        log: AccessLog,
        scheduling: SchedulingParams,
        convert: Callable[[int, TokenIds, Vector], Result],
    ) -> list[Result]:
        """What ``convert`` makes of the index, the token ids and the numbers of every text. It runs in a thread."""

        async def in_thread(begin: int, ids: list[list[int]], numbers: list[bytes]) -> list[Result]:
            return await asyncio.to_thread(
                lambda: list(map(convert, range(begin, begin + len(ids)), ids, map(vector_of, numbers)))
            )

        return await until_disconnect(request, self._run(texts, log, scheduling, in_thread))

    async def _run(
        self,
        texts: Texts,
        log: AccessLog,
        scheduling: SchedulingParams | None,
        convert: Callable[[int, list[list[int]], list[bytes]], Awaitable[list[Result]]],
    ) -> list[Result]:
        """``convert`` gets the results of a group of texts, of which it knows the index of the first and the ids."""
        requests = [PromptRequest(await ids, ONE_RESULT, scheduling or SchedulingParams()) for ids in texts]
        log.prompt_tokens = sum(len(prompt_request.prompt_ids) for prompt_request in requests)
        results: list[Result] = []
        try:
            for begin in range(0, len(requests), GROUP):
                group_log = log.silent_copy()
                group = requests[begin : begin + GROUP]
                numbers = await self._context.manager.generate(group, group_log).collect_embeddings()
                results += await convert(begin, [member.prompt_ids for member in group], numbers)
                log.add(group_log)
        except BaseException as error:
            log.close(error)
            raise
        log.close(None)
        return results


async def _as_vectors(_begin: int, _ids: list[list[int]], numbers: list[bytes]) -> list[Vector]:
    return list(map(vector_of, numbers))


async def _in_thread_if_long(size: int, encode: Callable[P, list[int]], *args: P.args, **kwargs: P.kwargs) -> list[int]:
    if size < LONG_TEXT:
        await asyncio.sleep(0)  # a thousand texts take a while: the event loop serves other requests in between
        return encode(*args, **kwargs)
    return await asyncio.to_thread(encode, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class PairOptions:
    truncation: int | None = None  # as truncate_prompt_tokens
    instruction: str | None = None
    is_raw: bool = False  # the number before the sigmoid
    is_probability: bool = False  # a sigmoid even for a regression, as in TEI
    scheduling: SchedulingParams | None = None
