"""For the HTTP processes and the detokenizer the dispatcher is the router. Behind it are several engines.

    httpserver ──GenerateReq──▶ dispatcher ──DispatchedReq──▶ router of the best engine
    detokenizer ◀──BatchTokenIdOut── dispatcher ◀──BatchTokenIdOut, KvCacheEvents── routers

It keeps every open request with its tokens. If an engine loses its workers, dies or hangs, its requests go on in the
other engines from these tokens, with the same text. Tokens that a request still gets from an engine that it has left
are dropped.
"""

from __future__ import annotations

import asyncio
import time

from lightserve.cluster.disaggregation import SAME_SERVER, KvExchange
from lightserve.cluster.engine import Engine
from lightserve.cluster.inflight_request import InflightRequest, open_request
from lightserve.cluster.link import EngineLink
from lightserve.cluster.metrics import ClusterMetrics
from lightserve.cluster.open_groups import OpenGroups
from lightserve.cluster.placement import Placement
from lightserve.cluster.prefill_jobs import PrefillJobs
from lightserve.cluster.queries import ClusterQueries, Query
from lightserve.config import RouterConfig
from lightserve.ipc.channel import Receiver, Sender
from lightserve.messages.cluster import (
    EngineDraining,
    FromEngine,
    KvCacheEvents,
    KvTransferTimeout,
    MovedReqs,
    RemotePrefillRequest,
)
from lightserve.messages.control import HttpProcessLost
from lightserve.messages.output import (
    BatchTokenIdOut,
    EmbeddingOut,
    RouterStats,
    TextReq,
    ToDetokenization,
    TokenIdOut,
    WeightsReplaced,
)
from lightserve.messages.request import (
    AbortByRequestId,
    AbortReq,
    ContinueReq,
    GenerateReq,
    HttpCounts,
    ReleaseParents,
    ToRouter,
    http_process_of,
)
from lightserve.messages.rl import AbortAll, PauseGeneration
from lightserve.messages.step import ReqFailed
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

HEARTBEAT_S = 1.0
TICK_S = 0.25
SILENT_TICKS = 20  # an engine sends a message every second; ticks, because a dispatcher that was stopped counts none
MAX_CRASHES = 3  # engines that die while they have a request, without a token of it in between
CRASHED = f"{MAX_CRASHES} engines died while they had this request; it is not tried again"


class Dispatcher:
    def __init__(
        self,
        placement: Placement,
        inbox: Receiver[ToRouter],
        to_detokenization: Sender[ToDetokenization],
        config: RouterConfig,
        num_engines: int,
    ) -> None:
        self.metrics = ClusterMetrics()
        self._placement = placement
        self._inbox = inbox
        self._to_detokenization = to_detokenization
        self._config = config
        self.addresses = dict.fromkeys(range(num_engines), "")  # of all engines, by number; "": on this machine
        self._queries = ClusterQueries(placement)
        self._jobs = PrefillJobs(placement)
        self._requests: dict[int, InflightRequest] = {}
        self._prompts = OpenGroups()
        self._unplaced: dict[int, InflightRequest] = {}  # of these, the requests that no engine can take now
        self._lost_http_processes: set[int] = set()
        self._readers: dict[int, asyncio.Task[None]] = {}
        self.training = self._queries.training
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._receive())
            self._tasks.create_task(self._send_heartbeats())
            self._tasks.create_task(self._watch())

    def join(self, number: int, link: EngineLink, role: str = "normal", kv_exchange: KvExchange = SAME_SERVER) -> None:
        """The router of an engine is ready."""
        if self._tasks is None:
            raise RuntimeError("an engine joined before the dispatcher ran")
        engine = self._placement.join(number, link, role, kv_exchange)
        self._readers[number] = self._tasks.create_task(self._read(engine))
        self._queries.engine_joined(engine)
        self._place_all()

    def leave(self, number: int) -> None:
        """The router of an engine died, or cannot be reached."""
        engine = self._placement.leave(number)
        if engine is None:
            return
        self._readers.pop(number).cancel()
        engine.link.close()
        self.metrics.engine_left(engine)
        self.metrics.values["dp_engine_restarts_total"] += not engine.is_draining
        for reply in self._queries.engine_left(number):
            self._to_detokenization.send(reply)
        for req in self._requests.values():
            req.leaving.discard(number)
            req.refused_by.discard(number)
        self._recover(engine)
        self._place_all()
        self._send_heartbeat()

    def drain(self, number: int) -> None:
        """The engine gets no new requests, and finishes those that it has."""
        engine = self._placement.get(number)
        if engine is not None:
            engine.is_draining = True
            self._send_heartbeat()

    def num_requests(self, number: int) -> int:
        """Requests that the engine has."""
        engine = self._placement.get(number)
        return 0 if engine is None else len(engine.requests)

    # from HTTP processes and the detokenizer

    async def _receive(self) -> None:
        while True:
            message = await self._inbox.recv()
            if isinstance(message, GenerateReq):
                self._accept(message, [])
            elif isinstance(message, ContinueReq):
                self._accept(message.request, message.output_ids)
            elif isinstance(message, AbortReq):
                self._abort(message)
            elif isinstance(message, ReleaseParents):
                self._release_parents(message)
            elif isinstance(message, AbortByRequestId):
                self._to_detokenization.send(message)
            elif isinstance(message, HttpCounts):
                self.metrics.add_http_counts(message)
            else:
                self._ask_engines(message)

    def _ask_engines(self, message: Query) -> None:
        if isinstance(message, AbortAll | PauseGeneration):
            self._end_unplaced(message)
        reply = self._queries.ask(message, self._placement)
        if reply is not None:
            self._to_detokenization.send(reply)

    def _end_unplaced(self, message: AbortAll | PauseGeneration) -> None:
        """The engines abort their requests. Those that no engine has end here."""
        if self._unplaced and (isinstance(message, AbortAll) or message.mode == "abort"):
            self._end(list(self._unplaced))

    def _accept(self, message: GenerateReq, output_ids: list[int]) -> None:
        if http_process_of(message.req_id) in self._lost_http_processes:
            return
        whole, config = self._prompts.with_prompt(message), self._config
        if whole is None:
            failure = ReqFailed(message.req_id, 500, message.unknown_parent)
            self._to_detokenization.send(BatchTokenIdOut(failed=[failure]))
            return
        req = open_request(whole, not config.disable_dynamic_prompt_cache, config.request_timeout or None)
        req.output_ids = output_ids.copy()
        self._requests[req.req_id] = req
        self._to_detokenization.send(BatchTokenIdOut(new=[TextReq(req.req_id, message.params.text, output_ids)]))
        if self._placement.place_request(req):
            return
        if len(self._unplaced) < config.max_queue_size:
            self._unplaced[req.req_id] = req
            return
        self.metrics.values["request_refused_total"] += 1
        reason = f"no engine runs now, and {len(self._unplaced)} requests wait (--max_queue_size); retry later"
        self._fail(req, 429, reason)

    def abort_http_process(self, lost: HttpProcessLost) -> None:
        """Abort the requests of an HTTP process that died."""
        self._lost_http_processes.add(lost.process)
        self._lost_http_processes.discard(lost.successor)
        for req_id in [req_id for req_id in self._requests if http_process_of(req_id) == lost.process]:
            self._abort(AbortReq(req_id))
        self._release_parents(ReleaseParents(self._prompts.of_process(lost.process)))
        self.metrics.http_process_lost(lost.process)

    def _release_parents(self, message: ReleaseParents) -> None:
        self._prompts.release(message.req_ids)
        for engine in self._placement:
            engine.link.send(message)

    def _abort(self, message: AbortReq) -> None:
        req = self._requests.get(message.req_id)
        if req is None:  # it has ended meanwhile
            return
        engine = self._placement.engine_of(req.req_id)
        self._forget(req)
        if engine is not None:
            engine.link.send(message)
        ids, is_kept = [req.req_id], message.keeps_tokens
        self._to_detokenization.send(BatchTokenIdOut(ended=ids if is_kept else [], aborted=[] if is_kept else ids))

    # from engines

    async def _read(self, engine: Engine) -> None:
        while True:
            message = await engine.link.recv()
            engine.silent_ticks = 0
            if engine.is_silent:
                engine.is_silent = False
                logger.info("engine %d answers again", engine.number)
                self._place_all()
            self._handle(engine, message)

    def _handle(self, engine: Engine, message: FromEngine) -> None:
        if isinstance(message, BatchTokenIdOut):
            self._handle_batch(engine, message)
        elif isinstance(message, KvCacheEvents):
            self._placement.index.apply(engine.number, message)
        elif isinstance(message, RouterStats):
            self._handle_stats(engine, message)
        elif isinstance(message, WeightsReplaced):
            reqs = [req for req in message.reqs if req.req_id in engine.requests]
            self._to_detokenization.send(WeightsReplaced(message.version, reqs))
        elif isinstance(message, RemotePrefillRequest):
            if message.req_id in engine.requests:  # else it has ended or left the engine
                self._jobs.start(engine.requests[message.req_id], engine, message)
        elif isinstance(message, KvTransferTimeout):
            self._jobs.kv_is_missing(engine, message)
        elif isinstance(message, EngineDraining):
            logger.info("engine %d drains: %d requests finish there", engine.number, len(engine.requests))
            self.drain(engine.number)
        else:
            reply = self._queries.add_reply(engine.number, message)
            if reply is not None:
                self._to_detokenization.send(reply)
            self._place_all()  # an engine may have got the weights that it lacked, or lack those that others have got
            self._send_heartbeat()

    def _handle_batch(self, engine: Engine, batch: BatchTokenIdOut) -> None:
        outs = [out for out in batch.tokens if out.req_id in engine.requests]  # others have ended or left the engine
        if outs:
            engine.add_tokens(outs, time.monotonic())
        outs = [out for out in outs if not self._is_of_job(engine, out)]
        for out in outs:
            if out.admission is not None:
                missed = engine.requests[out.req_id].cached_tokens - out.admission.cached_tokens
                self.metrics.values["dp_prefix_missed_tokens_total"] += max(missed - 1, 0)  # the last is never cached
            if out.finish_reason is not None:
                req = engine.requests[out.req_id]
                self._placement.output_length.observe(len(req.output_ids))
                self._forget(req)
        failed = [failure for failure in batch.failed if self._has_failed(engine, failure)]
        embeddings = self._end_pooling(engine, batch.embeddings)
        if outs or failed or embeddings:
            self._to_detokenization.send(
                BatchTokenIdOut(outs, failed=failed, embeddings=embeddings, drafts=batch.drafts)
            )
        for req_id in batch.aborted:
            self._confirm_left(engine, req_id)
        ended = [req_id for req_id in batch.ended if req_id in engine.requests]
        if ended:
            self._end(ended)

    def _end_pooling(self, engine: Engine, results: list[EmbeddingOut]) -> list[EmbeddingOut]:
        """Those whose requests have not ended or left the engine."""
        results = [result for result in results if result.req_id in engine.requests]
        if results:
            engine.observe_results([result.req_id for result in results], time.monotonic())
        for result in results:
            self._forget(engine.requests[result.req_id])
        return results

    def _end(self, req_ids: list[int]) -> None:
        """Requests were aborted, and their clients get what they have."""
        for req_id in req_ids:
            self._forget(self._requests[req_id])
        self._to_detokenization.send(BatchTokenIdOut(ended=req_ids))

    def _is_of_job(self, engine: Engine, out: TokenIdOut) -> bool:
        """Whether this is no token of a request, but the end of a prompt that another engine needs."""
        job = engine.requests[out.req_id]
        if job.target is None:
            return False
        self._jobs.finish(engine, job)
        return True

    def _has_failed(self, engine: Engine, failure: ReqFailed) -> bool:
        """Whether the request ends. If the queue of the engine is full, another engine may take it."""
        req = engine.requests.get(failure.req_id)
        if req is None:
            return False
        if req.target is not None:  # the engine that wants the prompt computes it
            self._jobs.fail(engine, req)
            counted = "request_refused_total" if failure.status == 429 else "request_failed_total"
            self.metrics.values[counted] -= 1  # by the engine
            return False
        if failure.status == 429:
            self._placement.remove(req)
            req.refused_by.add(engine.number)
            if self._placement.place_request(req):
                self.metrics.values["request_refused_total"] -= 1  # the engine has counted it
                return False
        self._forget(req)
        return True

    def _confirm_left(self, engine: Engine, req_id: int) -> None:
        """The engine has forgotten a request that was moved: it may get it again."""
        req = self._requests.get(req_id)
        if req is not None:
            req.leaving.discard(engine.number)
            if req_id in self._unplaced and self._placement.place_request(req):
                del self._unplaced[req_id]

    def _handle_stats(self, engine: Engine, stats: RouterStats) -> None:
        engine.stats = stats
        engine.presumed_adapters.clear()
        self._queries.adapters.check_equal(engine)
        had_workers, engine.has_workers = engine.has_workers, stats.has_workers and not stats.problem
        for req_id in stats.crash_suspects:
            if req_id in engine.requests:
                engine.requests[req_id].runs_alone = True
        if had_workers != engine.has_workers:
            self._place_all()
            self._send_heartbeat()

    # requests move

    def _place_all(self) -> None:
        """The set of serving engines has changed: place requests that wait, and those of engines that do not serve."""
        for engine in self._placement:
            if not engine.is_serving and self._placement.accepting():
                self._move_from(engine)
        for req_id, req in list(self._unplaced.items()):
            if self._placement.place_request(req):
                del self._unplaced[req_id]

    def _move_from(self, engine: Engine) -> None:
        """The engine's router runs, but generates no tokens now."""
        reqs = list(engine.requests.values())
        if not reqs:
            return
        engine.link.send(MovedReqs([req.req_id for req in reqs]))
        for req in reqs:
            self._requests[req.req_id].leaving.add(engine.number)
            if req.target is not None:
                self._drop_job(engine, req)
            else:
                self._move(req)
        logger.warning("engine %d generates no tokens: %d requests go on in other engines", engine.number, len(reqs))

    def _recover(self, engine: Engine) -> None:
        """Continue the requests of an engine that died. One that always kills its engine must not kill all."""
        for req in list(engine.requests.values()):
            if req.target is not None:
                self._drop_job(engine, req)
                continue
            req.crashes += not engine.is_draining  # one that drains was asked to end
            if req.crashes < MAX_CRASHES:
                self._move(req)
                continue
            self.metrics.values["request_failed_total"] += 1
            self._fail(req, 500, CRASHED)

    def _drop_job(self, engine: Engine, job: InflightRequest) -> None:
        """A prefill engine is lost. The prompt may be the cause: no other prefill engine gets it."""
        self._jobs.fail(engine, job)
        self._requests[job.req_id].may_prefill_remotely &= engine.is_draining

    def _move(self, req: InflightRequest) -> None:
        self._jobs.cancel(req)
        self._placement.remove(req)
        req.is_moved = True
        req.refused_by.clear()
        self.metrics.values["dp_requests_moved_total"] += 1
        if not self._placement.place_request(req):
            self._unplaced[req.req_id] = req

    def _fail(self, req: InflightRequest, status: int, message: str) -> None:
        self._forget(req)
        self._to_detokenization.send(BatchTokenIdOut(failed=[ReqFailed(req.req_id, status, message)]))

    def _forget(self, req: InflightRequest) -> None:
        """The request has ended."""
        del self._requests[req.req_id]
        self._unplaced.pop(req.req_id, None)
        self._jobs.cancel(req)
        self._placement.remove(req)

    # time

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._check_silence()
            now_s = time.monotonic()
            for req in list(self._unplaced.values()):  # engines watch the deadlines of the others
                if req.deadline_s is not None and req.deadline_s <= now_s:
                    timeout_s = round(req.deadline_s - req.request.arrived_s, 3)
                    self.metrics.values["request_failed_total"] += 1
                    reason = f"no engine could take the request within its timeout of {timeout_s:g} s; retry later"
                    self._fail(req, 503, reason)
            for reply in self._queries.tick():
                self._to_detokenization.send(reply)

    def _check_silence(self) -> None:
        for engine in self._placement:
            engine.silent_ticks += 1
            if engine.silent_ticks == SILENT_TICKS:
                engine.is_silent = True
                logger.warning("engine %d has not answered for %g s", engine.number, SILENT_TICKS * TICK_S)
                self._place_all()

    async def _send_heartbeats(self) -> None:
        while True:
            self._send_heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    def _send_heartbeat(self) -> None:
        """None if all engines hang: without heartbeats, /health says that the engine does not answer."""
        engines, serving = list(self._placement), self._placement.serving()
        if engines and all(engine.is_silent for engine in engines):
            return
        ages = [0.0 if engine.stats is None else engine.stats.step_age_s for engine in serving]
        self.metrics.values["kv_transfer_local_prefill_tokens_total"] = self._placement.local_prefill_tokens
        snapshot = self.metrics.snapshot(engines, self.addresses, len(self._unplaced))
        is_sleeping = any(engine.is_sleeping for engine in engines)
        problem = "" if serving else next((engine.problem for engine in engines if engine.problem), "")
        stats = RouterStats(min(ages, default=0.0), snapshot, bool(serving), is_sleeping=is_sleeping, problem=problem)
        self._to_detokenization.send(stats)
