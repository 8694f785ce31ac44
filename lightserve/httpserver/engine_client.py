"""The HTTP process's side of the engine: sends requests to the router and hands their text to the callers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from lightserve.errors import (
    AbortedError,
    InvalidRequestError,
    PromptTooLongError,
    SlowReaderError,
    UnavailableError,
    error_from_status,
)
from lightserve.httpserver.engine_state import EngineState as EngineState
from lightserve.httpserver.grammar.memory import GrammarMemory
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.http.unread import UnreadTokens, Write
from lightserve.httpserver.http.validation_errors import listed
from lightserve.httpserver.prompt_request import PromptRequest as PromptRequest, with_seed, with_seeds
from lightserve.httpserver.router_queries import RouterQueries
from lightserve.httpserver.weight_versions import WeightVersions, record_versions
from lightserve.ipc.channel import Receiver, Sender
from lightserve.messages.control import EngineInfo
from lightserve.messages.int_arrays import NO_INT32, int32s
from lightserve.messages.output import (
    BatchStrOut,
    EmbeddingOut,
    EndedOut,
    RouterStats,
    StrOut,
    ToHttpserver,
    WeightsReplaced,
)
from lightserve.messages.params import FinishReason, GrammarSpec
from lightserve.messages.request import (
    REQ_ID_BITS,
    AbortByRequestId,
    AbortReq,
    ContinueReq,
    GenerateReq,
    LoadAdapter,
    ReleaseParents,
    ToRouter,
    UnloadAdapter,
)
from lightserve.messages.step import NO_TOKEN

ABORTED = "the request was aborted"
SLEEPING = "the server sleeps, and requests wait until POST /wake_up or /resume_memory_occupation"
MAX_UNREAD = 2**16  # tokens of a request, some 20 MB, that the client has not read
LOAD_ADAPTER_TIMEOUT_S = 120.0  # others may be loaded before it
HEARTBEAT_TIMEOUT_S = 5.0  # the router sends one per second
SLOW_STEP_SHARE = 0.25  # of step_timeout_s: a step that runs longer makes the server unhealthy


class HttpServerManager:
    def __init__(
        self,
        http_process: int,
        to_router: Sender[ToRouter],
        from_detokenization: Receiver[ToHttpserver],
        sends_every_file: bool = False,
    ) -> None:
        """``sends_every_file``: other engines may get other choices of a prompt, so each has its images."""
        self.state = EngineState.LOADING
        self.stats: RouterStats | None = None
        self.no_workers_reason = "the model worker died; another one is starting, and requests wait for it"
        self._limits: EngineInfo | None = None
        self.has_adapters = False  # requests may name a LoRA adapter
        self._unavailable_reason = "the model is loading"
        self._to_router = to_router
        self._from_detokenization = from_detokenization
        self._last_heartbeat_s = 0.0
        self._ids = itertools.count(http_process << REQ_ID_BITS)
        self._running: dict[int, tuple[Generation, int]] = {}  # by req_id: its generation, and its index there
        self._arrived: list[Generation] = []  # whose first unread token is in the present message
        self._sends_every_file = sends_every_file
        self._grammars = GrammarMemory()
        self._drained = asyncio.Event()
        self._has_stats = asyncio.Event()
        self.queries = RouterQueries(http_process, to_router)

    @property
    def limits(self) -> EngineInfo:
        if self._limits is None:
            raise UnavailableError(self._unavailable_reason)
        return self._limits

    @property
    def running_requests(self) -> int:
        return len({id(generation) for generation, _ in self._running.values()})

    async def run(self) -> None:
        """Deliver text until cancelled."""
        while True:
            message = await self._from_detokenization.recv()
            self._last_heartbeat_s = time.monotonic()
            if isinstance(message, BatchStrOut):
                self._deliver(message)
            elif isinstance(message, RouterStats):
                self.stats = message
                self._has_stats.set()
            elif isinstance(message, WeightsReplaced):
                record_versions(message, self._running)
            elif isinstance(message, AbortByRequestId):
                self._abort_own_requests(message.request_id, message.owner)
            else:
                self.queries.resolve(message)

    def engine_info(self, limits: EngineInfo) -> None:
        """Accept requests."""
        self._limits = limits
        self.has_adapters = limits.lora_slots > 0
        self._last_heartbeat_s = time.monotonic()
        self.state = EngineState.READY

    def drain(self) -> None:
        """Refuse new requests. ``wait_drained`` returns when the last one has ended."""
        self.state = EngineState.DRAINING
        self._unavailable_reason = "the server is shutting down"
        self._check_drained()

    async def wait_drained(self) -> None:
        await self._drained.wait()

    def engine_died(self, message: str) -> None:
        """End every request with an error."""
        self.state = EngineState.DEAD
        self._unavailable_reason = message
        for generation, _ in list(self._running.values()):
            generation.fail(UnavailableError(message))

    def unhealthy_reason(self) -> str | None:
        """Why no token can be generated now; None: the server is healthy."""
        if self.state is not EngineState.READY:
            return self._unavailable_reason
        if time.monotonic() - self._last_heartbeat_s > HEARTBEAT_TIMEOUT_S:
            return "the engine does not answer"
        stats, timeout_s = self.stats, self.limits.step_timeout_s
        if stats is None:
            return None
        if stats.problem or not stats.has_workers:
            return stats.problem or (SLEEPING if stats.is_sleeping else self.no_workers_reason)
        is_slow = timeout_s and stats.step_age_s > SLOW_STEP_SHARE * timeout_s
        return f"a step has been running for {stats.step_age_s:.0f} s" if is_slow else None

    async def latest_stats(self) -> RouterStats | None:
        """What the router sent last. A process that is ready waits for the first; None: the engine does not answer."""
        if self.stats is None and self.unhealthy_reason() is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_stats.wait(), HEARTBEAT_TIMEOUT_S)
        return self.stats

    def max_new_tokens(self, prompt_len: int, requested: int | None, field: str = "max_tokens") -> int:
        """How many tokens a prompt of this length may get: what ``field`` requests, or the rest of the context."""
        limit = self.limits.max_req_total_len
        if prompt_len >= limit:
            raise PromptTooLongError(prompt_len, limit)
        if requested is not None and prompt_len + requested > limit:
            raise PromptTooLongError(prompt_len, limit, requested, field)
        return limit - prompt_len if requested is None else requested

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        vocab_size = self.limits.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = list(dict.fromkeys(token_id for token_id in ids if not 0 <= token_id < vocab_size))
            subject = f"token id {wrong[0]} is" if len(wrong) == 1 else f"token ids {listed(wrong)} are"
            raise InvalidRequestError(f"{name}: {subject} not in the range 0..{vocab_size - 1}", name)

    def generate(self, prompt_requests: Sequence[PromptRequest], log: AccessLog, n: int = 1) -> Generation:
        """``n`` sequences for each prompt. Entering it starts them, leaving it aborts the unfinished ones."""
        return Generation(self, [with_seed(req, choice) for req in prompt_requests for choice in range(n)], n, log)

    def new_group(self) -> int:
        """A group id for sequences that start one after the other and share prefixes."""
        return next(self._ids)

    async def load_adapter(self, name: str, path: str, replaces: bool) -> None:
        """Returns when requests can use the adapter."""
        self._check_ready()
        await self.queries.ask_adapters(
            lambda query_id: LoadAdapter(query_id, name, path, replaces), LOAD_ADAPTER_TIMEOUT_S
        )

    async def unload_adapter(self, name: str) -> None:
        self._check_ready()
        await self.queries.ask_adapters(lambda query_id: UnloadAdapter(query_id, name))

    def _check_ready(self) -> None:
        if self.state is not EngineState.READY:
            raise UnavailableError(self._unavailable_reason)

    def abort_requests(self, request_id: str | None, owner: str | None = None) -> None:
        """Abort the requests with this id or response id, None: all requests, in every HTTP process.

        ``owner``: only those of this client.
        """
        self._to_router.send(AbortByRequestId(request_id, owner))

    def _abort_own_requests(self, request_id: str | None, owner: str | None = None) -> None:
        for req_id, (generation, _) in list(self._running.items()):
            log = generation.log
            if request_id not in (None, log.request_id, log.response_id) or owner not in (None, log.owner):
                continue
            if generation.returns_aborted:
                self._to_router.send(AbortReq(req_id, keeps_tokens=True))
            else:
                generation.fail(AbortedError(ABORTED))

    def _start(self, generation: Generation) -> None:
        self._check_ready()
        self._grammars.add(generation.grammars)
        if not generation.has_ended:  # it may be continued after its last token
            self._send(generation)

    def _send(self, generation: Generation) -> None:
        arrived_s = generation.log.arrived_s
        prompt_ids, converted = NO_INT32, None
        for index, prompt_request in enumerate(generation.prompt_requests):
            if prompt_request.prompt_ids is not converted:  # the choices of a prompt have the same list
                prompt_ids, converted = int32s(prompt_request.prompt_ids), prompt_request.prompt_ids
            req_id = next(self._ids)
            self._running[req_id] = (generation, index)
            generation.req_ids.append(req_id)
            if index not in generation._unfinished:  # it ended in another server
                continue
            first_index = index - index % generation.n
            first = generation.req_ids[first_index]  # the first sequence of the same prompt
            is_open = prompt_request.group is not None
            sends_files = index == 0 if is_open else generation._unfinished.isdisjoint(range(first_index, index))
            group = first if prompt_request.group is None else prompt_request.group
            request = GenerateReq(
                req_id,
                prompt_ids,
                prompt_request.params,
                arrived_s,
                prompt_request.scheduling,
                group,
                is_group_open=is_open,
                request_id=generation.log.request_id,
                parent=None if prompt_request.parent is None else generation.parent_ids[prompt_request.parent],
                owner=generation.log.owner,
                images=prompt_request.images_to_send(self._sends_every_file or sends_files),
            )
            sent_ids = generation.sent_token_ids.get(index)
            self._to_router.send(request if sent_ids is None else ContinueReq(request, sent_ids))

    def _deliver(self, batch: BatchStrOut) -> None:
        for out in batch.outs:
            if entry := self._running.get(out.req_id):  # else the caller has left
                entry[0].push(entry[1], out)
        self._write_arrived()
        for embedding in batch.embeddings:
            if entry := self._running.get(embedding.req_id):
                entry[0].push_embedding(entry[1], embedding)
        for ended in batch.ended:
            if entry := self._running.get(ended.req_id):
                entry[0].push_end(entry[1], ended)
        for failed in batch.failed:
            if entry := self._running.get(failed.req_id):
                entry[0].fail(error_from_status(failed.status, failed.message))

    def _write_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for generation in arrived:
            try:
                generation.unread.deliver()
            except Exception as error:  # the reader's: it would have written these tokens
                generation.fail(error)

    def _close(self, req_id: int, is_finished: bool) -> None:
        del self._running[req_id]
        if not is_finished:
            self._to_router.send(AbortReq(req_id))
        if self.state is not EngineState.READY:
            self._check_drained()

    def _check_drained(self) -> None:
        if not self._running:
            self._drained.set()


class Generation:
    """The sequences of one HTTP request. Iterating gives the tokens that have arrived, as lists of (index, token)."""

    def __init__(
        self, manager: HttpServerManager, prompt_requests: list[PromptRequest], n: int, log: AccessLog
    ) -> None:
        self.prompt_requests = prompt_requests
        self.n = n  # sequences a prompt: prompt i has the indices i * n ... i * n + n - 1
        self.log = log
        self.returns_aborted = False  # set by the route: an abort ends it with the tokens that it has
        self.req_ids: list[int] = []
        self.parent_ids: list[int] = []  # the sequences before those of the last ``continue_with``
        self.sent_token_ids: dict[int, list[int]] = {}  # by index: tokens that the client has already
        self.versions = WeightVersions()
        self._manager = manager
        self.unread = UnreadTokens()
        self._unfinished = set(range(len(prompt_requests)))
        self._error: Exception | None = None
        self._embeddings: dict[int, bytes] = {}  # by index: results of pooling requests

    async def __aenter__(self) -> Self:
        self._manager._start(self)
        self.log.is_generating = True
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, StrOut]]:
        unread = self.unread
        if not unread.outs and self._error is None:
            if not self._unfinished:
                raise StopAsyncIteration
            await unread.wait()
            if not unread.outs and self._error is None:
                raise StopAsyncIteration  # pooling requests end without tokens
        if not unread.outs and self._error is not None:
            raise self._error
        return unread.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._manager._grammars.remove(self.grammars)
        for index, req_id in enumerate(self.req_ids):
            self._manager._close(req_id, is_finished=index not in self._unfinished)
        if self._is_open:
            self._manager._to_router.send(ReleaseParents([*self.parent_ids, *self.req_ids]))
        self.unread.close()
        self.log.close(error)

    def continue_with(self, prompt_requests: Sequence[PromptRequest]) -> None:
        """Start these sequences after all others have finished. A drain waits for them: it is the same HTTP request.

        Their parents are among those that have finished, so the parents of those are not needed any more.
        """
        unneeded, self.parent_ids, self.req_ids = self.parent_ids, self.req_ids, []
        grammars, self.prompt_requests = self.grammars, list(prompt_requests)
        self._manager._grammars.replace(grammars, self.grammars)
        self._unfinished = set(range(len(self.prompt_requests)))
        self._manager._send(self)
        for req_id in self.parent_ids:
            self._manager._close(req_id, is_finished=True)
        if unneeded and self._is_open:
            self._manager._to_router.send(ReleaseParents(unneeded))

    @property
    def _is_open(self) -> bool:
        """Whether other sequences may have these as parents."""
        return any(req.group is not None for req in self.prompt_requests)

    async def collect(self) -> list[list[StrOut]]:
        """Start, wait for the end, and return all tokens of every sequence."""
        outs: list[list[StrOut]] = [[] for _ in self.prompt_requests]
        async with self:
            async for arrived in self:
                for index, out in arrived:
                    outs[index].append(out)
        return outs

    @property
    def grammars(self) -> list[GrammarSpec]:
        """Of its sequences that have one."""
        given = (req.params.sampling.grammar for req in self.prompt_requests)
        return [grammar for grammar in given if grammar is not None]

    def fix_seeds(self, seeds: Sequence[int] | None = None) -> list[int]:
        """Sample with these seeds; None: with those of the request, random ones where it has none. Returns them."""
        self.prompt_requests, fixed = with_seeds(self.prompt_requests, seeds)
        return fixed

    def continue_after(self, outs: Sequence[tuple[int, StrOut]], age_s: float) -> None:
        """The client has these tokens, from another server. The request came ``age_s`` ago, and starts after this."""
        self.log.arrived_s -= age_s
        for index, out in outs:
            self.sent_token_ids.setdefault(index, []).append(out.token.id)
            self.log.generated_tokens += 1
            self._record(index, out)

    @property
    def has_ended(self) -> bool:
        return not self._unfinished

    def push(self, index: int, out: StrOut) -> None:
        self.log.generated_tokens += 1
        if out.finish_reason is not None or out.admission is not None:
            self._record(index, out)
        if self._error is not None:
            return
        unread = self.unread.outs
        unread.append((index, out))
        if len(unread) == 1:
            self._manager._arrived.append(self)
        elif len(unread) > MAX_UNREAD:
            unread.clear()
            self.fail(SlowReaderError(f"the client left more than {MAX_UNREAD} tokens unread"))

    def push_end(self, index: int, ended: EndedOut) -> None:
        """The sequence was aborted, and no token follows."""
        if not self.returns_aborted:
            self.fail(AbortedError(ABORTED))
        elif self._error is None and index in self._unfinished:
            self.log.record_finish(FinishReason.ABORT)
            self._unfinished.discard(index)
            self.unread.outs.append((index, StrOut(ended.req_id, ended.text, NO_TOKEN, FinishReason.ABORT)))
            self.unread.wake_reader()

    def _record(self, index: int, out: StrOut) -> None:
        """The beginning and the end of a sequence."""
        if out.admission is not None:
            self.versions.begin(index, out.admission.weight_version)
            self.log.record_admission(out.admission, is_first_choice=index % self.n == 0)
        if out.finish_reason is not None:
            self.log.record_finish(out.finish_reason)
            self.log.count_drafts(out.drafts)
            self._unfinished.discard(index)

    async def collect_embeddings(self) -> list[bytes]:
        """Start, wait for the end, and return the result of every pooling request: float32 numbers."""
        async with self:
            async for _ in self:
                raise TypeError("a pooling request has no tokens")
        return [self._embeddings[index] for index in range(len(self.prompt_requests))]

    def push_embedding(self, index: int, out: EmbeddingOut) -> None:
        self.log.record_admission(out.admission, is_first_choice=True)
        self.log.record_finish(FinishReason.STOP)
        self._embeddings[index] = out.values
        self._unfinished.discard(index)
        if not self._unfinished:
            self.unread.wake_reader()

    def fail(self, error: Exception) -> None:
        """The whole request fails when one of its sequences does; leaving aborts the other sequences."""
        self._error = error
        self.unread.wake_reader()

    def write_with(self, write: Write) -> None:
        """Tokens before the last one are written with this function while the reader waits for them."""
        self.unread.write = write
