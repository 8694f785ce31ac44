"""The router's only loop: receive, schedule, run, report."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from lightserve.config import RouterConfig
from lightserve.io_struct import (
    AbortReq,
    Admission,
    BatchTokenIdOut,
    EngineReady,
    GenerateReq,
    ReqFailed,
    RouterStats,
    Step,
    TextReq,
    ToDetokenization,
    TokenIdOut,
    TokenOut,
    ToRouter,
)
from lightserve.router.model_client import ModelClient
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler
from lightserve.router.stats import RouterMetrics, ThroughputLog
from lightserve.utils.channel import Receiver, Sender
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

HEARTBEAT_S = 1.0
DEADLINE_CHECK_S = 0.25


class RouterManager:
    def __init__(
        self,
        scheduler: Scheduler,
        model: ModelClient,
        engine: EngineReady,
        inbox: Receiver[ToRouter],
        to_detokenization: Sender[ToDetokenization],
        config: RouterConfig,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._engine = engine
        self._inbox = inbox
        self._to_detokenization = to_detokenization
        self._config = config
        self._has_work = asyncio.Event()
        self._under_way: deque[tuple[float, asyncio.Future[list[TokenOut]]]] = deque()  # with when it was sent
        self._gone: list[int] = []  # aborted since the last report
        self.metrics = RouterMetrics()

    async def run(self, log: ThroughputLog) -> None:
        """Serve until a worker dies, which ends the process; the launcher tells the clients."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._step_on())
            tasks.create_task(self._beat(log))
            tasks.create_task(self._watch_deadlines())

    async def _receive(self) -> None:
        while True:
            message = await self._inbox.recv()
            if isinstance(message, GenerateReq):
                self._accept(message)
            elif isinstance(message, AbortReq):
                self._abort(message)
            else:
                self._to_detokenization.send(message)

    def _accept(self, message: GenerateReq) -> None:
        limit = self._config.max_queue_size
        if self._scheduler.num_waiting >= limit:
            self.metrics.refused()
            refusal = ReqFailed(message.req_id, 429, f"{limit} requests are waiting already; try later")
            self._to_detokenization.send(BatchTokenIdOut(failed=[refusal]))
            return
        sampling = message.sampling
        text = TextReq(
            message.req_id,
            sampling.stop,
            sampling.include_stop,
            sampling.skip_special_tokens,
            sampling.shown_special_ids,
        )
        self._to_detokenization.send(BatchTokenIdOut(new=[text]))
        self._scheduler.add(self._req_of(message))
        self._has_work.set()

    def _req_of(self, message: GenerateReq) -> Req:
        terms = message.terms
        timeout_s = terms.timeout_s or self._config.request_timeout or None
        shares = terms.use_cache and not self._config.disable_dynamic_prompt_cache
        return Req(
            message.req_id,
            message.prompt_ids,
            message.sampling,
            message.sampling.max_new_tokens,
            self._engine.eos_token_ids,
            arrived_s=message.arrived_s,
            priority=terms.priority,
            deadline_s=None if timeout_s is None else message.arrived_s + timeout_s,
            salt=f"salt {terms.cache_salt}" if shares else f"group {message.group}",  # choices share in any case
        )

    def _abort(self, message: AbortReq) -> None:
        req = self._scheduler.abort(message.req_id)
        if req is None:  # it ended by itself meanwhile
            return
        self._gone.append(message.req_id)
        self._note_finished(req, message.reason.value, time.monotonic())
        self._has_work.set()

    async def _step_on(self) -> None:
        """Keep the workers busy: up to ``pipeline_depth`` steps are under way, the next is planned meanwhile."""
        while True:
            self._fill_pipeline()
            if not self._under_way:
                self._report([])
                self._has_work.clear()
                await self._has_work.wait()
                continue
            outs = await self._under_way[0][1]
            self._under_way.popleft()
            self._report(outs)

    def _fill_pipeline(self) -> None:
        while len(self._under_way) < self._engine.pipeline_depth:
            now = time.monotonic()
            step = self._plan(now)
            if step is None:
                return
            self._under_way.append((now, self._model.run(step)))
            self.metrics.step(sum(len(row.slots) for row in step.rows))

    def _plan(self, now: float) -> Step | None:
        scheduler = self._scheduler
        pauses, evicted = scheduler.num_pauses, scheduler.pool.num_evicted
        step = scheduler.next_step(now)
        self.metrics.preempted(scheduler.num_pauses - pauses)
        self.metrics.evicted(scheduler.pool.num_evicted - evicted)
        return step

    def _report(self, outs: list[TokenOut]) -> None:
        """One message with all tokens of a step, and who is gone since the last."""
        now = time.monotonic()
        gaps: dict[float, int] = {}  # when the last token was -> how many requests; one step serves most of them
        rows, failed = [], []
        for req, out in self._scheduler.take(outs):
            if req.error is not None:
                failed.append(ReqFailed(req.req_id, req.error_status, req.error))
                continue
            admission = None
            if len(req.output_ids) == 1:
                admission = self._note_first_token(req, now)
            else:
                gaps[req.last_token_s] = gaps.get(req.last_token_s, 0) + 1
            req.last_token_s = now
            rows.append(
                TokenIdOut(
                    req.req_id,
                    out.token_id,
                    out.logprob,
                    out.top,
                    req.finish_reason,
                    req.stop_token,
                    admission,
                    req.ends_in_text,
                    out.prompt,
                )
            )
            if req.finish_reason is not None:
                self._note_finished(req, req.finish_reason.value, now)
        for last_token_s, count in gaps.items():
            self.metrics.next_tokens(now - last_token_s, count)
        self.metrics.failed(len(failed))
        self.metrics.not_numbers(sum(failure.status >= 500 for failure in failed))
        if rows or failed or self._gone:
            self._to_detokenization.send(BatchTokenIdOut(rows, failed=failed, gone=self._gone))
            self._gone = []

    def _note_first_token(self, req: Req, now: float) -> Admission:
        req.first_token_s = now
        queue_s = req.admitted_s - req.arrived_s
        self.metrics.admitted(queue_s, len(req.prompt_ids), req.cached_len)
        self.metrics.first_token(now - req.arrived_s, now - req.admitted_s)
        return Admission(queue_s, req.cached_len)

    def _note_finished(self, req: Req, reason: str, now: float) -> None:
        has_run = bool(req.output_ids)
        self.metrics.finished(
            reason,
            now - req.arrived_s,
            now - req.first_token_s if has_run else 0.0,
            now - req.admitted_s if has_run else 0.0,
            len(req.prompt_ids),
            len(req.output_ids),
            req.max_new_tokens,
        )

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(DEADLINE_CHECK_S)
            expired = self._scheduler.expire(time.monotonic())
            if expired:
                failed = [ReqFailed(req.req_id, 504, "the request took longer than its timeout") for req in expired]
                self._to_detokenization.send(BatchTokenIdOut(failed=failed))
                self.metrics.failed(len(failed))
                self._has_work.set()

    async def _beat(self, log: ThroughputLog) -> None:
        """Once a second: a sign of life with the metrics, now and then a line in the log."""
        while True:
            now = time.monotonic()
            self.metrics.set_load(
                self._scheduler.num_running,
                self._scheduler.num_waiting,
                self._scheduler.pool.used,
                self._scheduler.pool.size,
            )
            step_age_s = now - self._under_way[0][0] if self._under_way else 0.0
            self._to_detokenization.send(RouterStats(now, step_age_s, self.metrics.snapshot()))
            if line := log.line(now):
                logger.info(line)
            await asyncio.sleep(HEARTBEAT_S)
