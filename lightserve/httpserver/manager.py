"""The HTTP process's side of the engine: requests go to the router, each request's text comes back to its caller."""

from __future__ import annotations

import asyncio
import enum
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from lightserve.errors import (
    AbortedError,
    InvalidRequestError,
    LightserveError,
    PromptTooLongError,
    SlowReaderError,
    UnavailableError,
    error_from_status,
)
from lightserve.httpserver.access_log import AccessLog
from lightserve.io_struct import (
    REQ_ID_BITS,
    AbortNamed,
    AbortReq,
    BatchStrOut,
    EngineReady,
    GenerateReq,
    GenerationParams,
    RouterStats,
    SchedulingParams,
    StrOut,
    ToHttpserver,
    ToRouter,
)
from lightserve.utils.channel import Receiver, Sender

DEFAULT_SCHEDULING = SchedulingParams()
MAX_UNREAD = 2**16  # tokens of a request, some 20 MB, that wait for a client which does not read
SILENCE_S = 5.0  # the router speaks once a second; after this the engine counts as dead
SLOW_STEP = 0.25  # of the time after which a step counts as hung: then it is not healthy any more


class EngineState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, how to continue it, and how to treat it."""

    prompt_ids: list[int]
    params: GenerationParams
    scheduling: SchedulingParams = DEFAULT_SCHEDULING
    group: int | None = (
        None  # whose sequences share prefixes however it is scheduled; None: that of the prompt's answers
    )


class HttpServerManager:
    def __init__(
        self,
        index: int,
        to_router: Sender[ToRouter],
        from_detokenization: Receiver[ToHttpserver],
    ) -> None:
        self.state = EngineState.LOADING
        self.stats: RouterStats | None = None
        self._limits: EngineReady | None = None
        self._why_not = "the model is loading"
        self._to_router = to_router
        self._from_detokenization = from_detokenization
        self._heard_s = 0.0
        self._ids = itertools.count(index << REQ_ID_BITS)
        self._open: dict[int, tuple[Generation, int]] = {}  # a sequence's request, and its index there
        self._drained = asyncio.Event()

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise UnavailableError(self._why_not)
        return self._limits

    @property
    def open_requests(self) -> int:
        return len({id(generation) for generation, _ in self._open.values()})

    async def run(self) -> None:
        """Deliver text until cancelled."""
        while True:
            message = await self._from_detokenization.recv()
            self._heard_s = time.monotonic()
            if isinstance(message, BatchStrOut):
                self._deliver(message)
            elif isinstance(message, RouterStats):
                self.stats = message
            else:
                self._abort_named(message.name)

    def serve(self, limits: EngineReady) -> None:
        """The engine is warm: take requests."""
        self._limits = limits
        self._heard_s = time.monotonic()
        self.state = EngineState.READY

    def drain(self) -> None:
        """Take no new request; ``drained`` tells when the last one is gone."""
        self.state = EngineState.DRAINING
        self._why_not = "the server is shutting down"
        self._note_drained()

    async def drained(self) -> None:
        await self._drained.wait()

    def die(self, message: str) -> None:
        """The engine is gone: every request ends with an error."""
        self.state = EngineState.DEAD
        self._why_not = message
        for generation, _ in list(self._open.values()):
            generation.fail(UnavailableError(message))

    def trouble(self) -> str | None:
        """Why no token could be produced now; None when healthy."""
        if self.state is not EngineState.READY:
            return self._why_not
        if time.monotonic() - self._heard_s > SILENCE_S:
            return "the engine does not answer"
        if self.stats is not None and not self.stats.has_workers:
            return "the model worker died; another one is starting, and requests wait for it"
        timeout_s = self.limits.step_timeout_s
        if self.stats is not None and timeout_s and self.stats.step_age_s > SLOW_STEP * timeout_s:
            return f"a step has been running for {self.stats.step_age_s:.0f} s"
        return None

    def new_tokens(self, prompt_len: int, wanted: int | None) -> int:
        """How many tokens a prompt of this length may get: what was wanted, or the rest of the context."""
        limit = self.limits.max_req_total_len
        if prompt_len >= limit:
            raise PromptTooLongError(prompt_len, limit - 1)
        if wanted is not None and prompt_len + wanted > limit:
            raise PromptTooLongError(prompt_len, limit - wanted, wanted)
        return limit - prompt_len if wanted is None else wanted

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        vocab_size = self.limits.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequestError(f"{name}: token ids must be in 0..{vocab_size - 1}", name)

    def generate(self, asks: Sequence[Ask], log: AccessLog, n: int = 1) -> Generation:
        """``n`` answers to each of ``asks``; enter it to start, leave it to abort what is unfinished."""
        return Generation(self, [_with_seed(ask, choice) for ask in asks for choice in range(n)], n, log)

    def new_group(self) -> int:
        """For asks that come one after the other and share prefixes."""
        return next(self._ids)

    def abort_named(self, name: str | None) -> None:
        """Abort the requests of this name, None for all, in whichever HTTP process they are."""
        self._to_router.send(AbortNamed(name))

    def _abort_named(self, name: str | None) -> None:
        for generation, _ in list(self._open.values()):
            if name is None or generation.log.request_id == name:
                generation.fail(AbortedError("the request was aborted"))

    def _start(self, generation: Generation) -> None:
        if self.state is not EngineState.READY:
            raise UnavailableError(self._why_not)
        self._send(generation)

    def _send(self, generation: Generation) -> None:
        arrived_s = generation.log.arrived_s
        for index, ask in enumerate(generation.asks):
            req_id = next(self._ids)
            self._open[req_id] = (generation, index)
            generation.req_ids.append(req_id)
            first = generation.req_ids[index - index % generation.n]  # the first answer to the same prompt
            group = first if ask.group is None else ask.group
            self._to_router.send(GenerateReq(req_id, ask.prompt_ids, ask.params, arrived_s, ask.scheduling, group))

    def _deliver(self, batch: BatchStrOut) -> None:
        for out in batch.outs:
            found = self._open.get(out.req_id)
            if found is not None:  # else the caller has gone
                found[0].push(found[1], out)
        for failed in batch.failed:
            found = self._open.get(failed.req_id)
            if found is not None:
                found[0].fail(error_from_status(failed.status, failed.message))

    def _close(self, req_id: int, is_finished: bool) -> None:
        del self._open[req_id]
        if not is_finished:
            self._to_router.send(AbortReq(req_id))
        if self.state is not EngineState.READY:
            self._note_drained()

    def _note_drained(self) -> None:
        if not self._open:
            self._drained.set()


class Generation:
    """The sequences of one HTTP request. Iterating gives what has come, as lists of (index, token with its text)."""

    def __init__(self, manager: HttpServerManager, asks: list[Ask], n: int, log: AccessLog) -> None:
        self.asks = asks
        self.n = n  # answers a prompt: those of prompt i have the indices i * n ... i * n + n - 1
        self.log = log
        self.req_ids: list[int] = []
        self._manager = manager
        self._news: list[tuple[int, StrOut]] = []
        self._has_news = asyncio.Event()
        self._unfinished = set(range(len(asks)))
        self._error: LightserveError | None = None

    async def __aenter__(self) -> Self:
        self._manager._start(self)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, StrOut]]:
        if not self._news and self._error is None:
            if not self._unfinished:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        if not self._news and self._error is not None:
            raise self._error
        news, self._news = self._news, []
        return news

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for index, req_id in enumerate(self.req_ids):
            self._manager._close(req_id, is_finished=index not in self._unfinished)
        self.log.close(error)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Go on with these sequences, when all before them are finished. It is one request, which a drain waits for."""
        finished, self.req_ids = self.req_ids, []
        self.asks = list(asks)
        self._unfinished = set(range(len(self.asks)))
        self._manager._send(self)
        for req_id in finished:
            self._manager._close(req_id, is_finished=True)

    def push(self, index: int, out: StrOut) -> None:
        if self._error is None:
            self._news.append((index, out))
        self.log.note(out, is_first_choice=index % self.n == 0)
        if out.finish_reason is not None:
            self._unfinished.discard(index)
        self._has_news.set()
        if len(self._news) > MAX_UNREAD:
            self._news.clear()
            self.fail(SlowReaderError(f"more than {MAX_UNREAD} tokens were not read"))

    def fail(self, error: LightserveError) -> None:
        """One sequence that fails takes the request with it; leaving aborts the others."""
        self._error = error
        self._has_news.set()


def _with_seed(ask: Ask, choice: int) -> Ask:
    """Choices of one prompt with one seed differ, and each is the same every time."""
    seed = ask.params.sampling.seed
    if seed is None or choice == 0:
        return ask
    return replace(ask, params=ask.params.replace(seed=(seed + choice + 2**63) % 2**64 - 2**63))
