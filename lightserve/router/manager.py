"""The router's loop: receive requests, plan steps, send them to the workers, report tokens."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple

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
    StepResult,
    TextReq,
    ToDetokenization,
    TokenIdOut,
    ToRouter,
)
from lightserve.router.model_client import ModelClient
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler
from lightserve.router.stats import RouterMetrics, ThroughputLog
from lightserve.router.step_pacer import StepKind, StepPacer, kind_of
from lightserve.utils.channel import Receiver, Sender
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

HEARTBEAT_S = 1.0
DEADLINE_CHECK_S = 0.25


CRASHED_TWICE = "the model worker died twice while it computed this request; it is not tried again"


class InFlightStep(NamedTuple):
    """A step that was sent to the workers, and whose tokens are not back."""

    sent_s: float
    kind: StepKind
    result: asyncio.Future[StepResult]


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
        self._wake = asyncio.Event()  # set by a request, by the tokens of a step, or when the next step is due
        self._in_flight: deque[InFlightStep] = deque()  # oldest first
        self._pacer = StepPacer()
        self._timer: asyncio.TimerHandle | None = None
        self._was_full = False  # requests were left waiting after the last planned step
        self._has_workers = True  # if not, requests wait for new ones
        self._aborted: list[int] = []  # requests aborted since the last report
        self.metrics = RouterMetrics()

    async def run(self, log: ThroughputLog) -> None:
        """Serve until cancelled. If the workers die, requests wait until ``use_workers``."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._run_steps())
            tasks.create_task(self._send_heartbeats(log))
            tasks.create_task(self._watch_deadlines())

    def use_workers(self, model: ModelClient) -> None:
        """Continue with new workers, which hold no KV and no requests."""
        self._on_workers_lost("they were replaced")
        self._model = model
        self._has_workers = True
        self.metrics.workers_restarted()
        self._wake.set()

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
        self._to_detokenization.send(BatchTokenIdOut(new=[TextReq(message.req_id, message.params.text)]))
        self._scheduler.add(self._make_req(message))
        self._wake.set()

    def _make_req(self, message: GenerateReq) -> Req:
        scheduling = message.scheduling
        timeout_s = scheduling.timeout_s or self._config.request_timeout or None
        uses_cache = scheduling.use_cache and not self._config.disable_dynamic_prompt_cache
        return Req(
            message.req_id,
            message.prompt_ids,
            message.params,
            message.params.stopping.max_new_tokens,
            self._engine.eos_token_ids,
            arrived_s=message.arrived_s,
            priority=scheduling.priority,
            deadline_s=None if timeout_s is None else message.arrived_s + timeout_s,
            salt=f"salt {scheduling.cache_salt}" if uses_cache else f"group {message.group}",  # its choices share
            leaves_cache=uses_cache,
        )

    def _abort(self, message: AbortReq) -> None:
        req = self._scheduler.abort(message.req_id)
        if req is None:  # it has ended meanwhile
            return
        self._aborted.append(message.req_id)
        self._record_finished(req, message.reason.value, time.monotonic())
        self._wake.set()

    async def _run_steps(self) -> None:
        """Keep up to ``pipeline_depth`` steps in flight, so that the workers never wait."""
        while True:
            self._fill_pipeline()
            if not self._process_result():
                if not self._in_flight:
                    self._report(StepResult())
                self._wake.clear()
                await self._wake.wait()

    def _process_result(self) -> bool:
        """Process the result of the oldest step in flight. Returns False if it is not back."""
        if not self._in_flight or not self._in_flight[0].result.done():
            return False
        first = self._in_flight[0]
        if first.result.exception() is not None:  # its workers died: _fill_pipeline handles that
            return self._model.is_lost
        self._in_flight.popleft()
        self._pacer.record(first.kind, first.sent_s, time.monotonic())
        self._scheduler.complete_step()
        self._report(first.result.result())
        return True

    def _fill_pipeline(self) -> None:
        self._check_workers(time.monotonic())
        depth = 1 if self._scheduler.is_isolating_crash else self._engine.pipeline_depth
        while self._has_workers and len(self._in_flight) < depth:
            now = time.monotonic()
            if self._in_flight and not self._was_full and self._is_early(self._in_flight[-1], now):
                return
            step = self._plan(now)
            if step is None:
                return
            self._was_full = self._scheduler.num_waiting > 0
            count = sum(len(row.slots) for row in step.rows)
            result = self._model.run(step)
            result.add_done_callback(lambda _: self._wake.set())
            self._in_flight.append(InFlightStep(now, kind_of(count, len(step.rows)), result))
            self.metrics.step(count)

    def _is_early(self, last: InFlightStep, now: float) -> bool:
        """Whether it is too early for the next step. If so, a timer wakes the loop when the step is due."""
        wait_s = self._pacer.send_at(last.kind, last.sent_s) - now
        if wait_s <= 0:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake.set)
        return True

    def _plan(self, now: float) -> Step | None:
        scheduler = self._scheduler
        preemptions, evicted = scheduler.num_preemptions, scheduler.pool.num_evicted
        step = scheduler.next_step(now)
        self.metrics.preempted(scheduler.num_preemptions - preemptions)
        self.metrics.evicted(scheduler.pool.num_evicted - evicted)
        return step

    def _check_workers(self, now: float) -> None:
        """Replace the workers if the connection is closed or a step does not end."""
        limit_s = self._engine.step_timeout_s
        if self._model.is_lost:
            self._on_workers_lost("the connection was closed")
        elif limit_s and self._step_age(now) > limit_s:
            self._on_workers_lost(f"a step has been running for {self._step_age(now):.0f} s")

    def _on_workers_lost(self, reason: str) -> None:
        """All KV is lost. The crashing request fails if it is known; the others wait for new workers."""
        if not self._has_workers:
            return
        self._has_workers = False
        crashing_request = self._scheduler.recover_from_crash()
        self._in_flight.clear()
        self._model.request_restart(reason, is_explained=crashing_request is not None)
        if crashing_request is not None:
            self._fail([ReqFailed(crashing_request.req_id, 500, CRASHED_TWICE)])
        self._send_stats(time.monotonic())  # /health should not wait for the next heartbeat

    def _fail(self, failed: list[ReqFailed]) -> None:
        self._to_detokenization.send(BatchTokenIdOut(failed=failed))
        self.metrics.failed(len(failed))

    def _step_age(self, now: float) -> float:
        return now - self._in_flight[0].sent_s if self._in_flight else 0.0

    def _report(self, result: StepResult) -> None:
        """Send one message with all tokens of a step and the requests aborted since the last message."""
        now = time.monotonic()
        gaps: dict[float, int] = {}  # time of the last token -> requests; most requests got it in the same step
        failed = [failure for failure in result.failed if self._scheduler.fail(failure) is not None]
        outs = []
        for out in result.tokens:
            req = self._scheduler.process_token(out)
            if req is None:
                continue
            admission = None
            if len(req.output_ids) == 1:
                admission = self._record_first_token(req, now)
            else:
                gaps[req.last_token_s] = gaps.get(req.last_token_s, 0) + 1
            req.last_token_s = now
            self.metrics.forced(out.is_forced)
            outs.append(
                TokenIdOut(
                    req.req_id,
                    out.token,
                    finish_reason=req.finish_reason,
                    stop_reason=req.stop_token,
                    admission=admission,
                    ends_in_text=req.ends_in_text,
                )
            )
            if req.finish_reason is not None:
                self._record_finished(req, req.finish_reason.value, now)
        for last_token_s, count in gaps.items():
            self.metrics.next_tokens(now - last_token_s, count)
        self.metrics.failed(len(failed))
        self.metrics.numerical_errors(sum(failure.status >= 500 for failure in failed))
        if outs or failed or self._aborted:
            self._to_detokenization.send(BatchTokenIdOut(outs, failed=failed, aborted=self._aborted))
            self._aborted = []

    def _record_first_token(self, req: Req, now: float) -> Admission:
        req.first_token_s = now
        queue_s = req.admitted_s - req.arrived_s
        self.metrics.admitted(queue_s, len(req.prompt_ids), req.cached_len)
        self.metrics.first_token(now - req.arrived_s, now - req.admitted_s)
        return Admission(queue_s, req.cached_len)

    def _record_finished(self, req: Req, reason: str, now: float) -> None:
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
                self._fail([ReqFailed(req.req_id, 504, "the request took longer than its timeout") for req in expired])
                self._wake.set()

    async def _send_heartbeats(self, log: ThroughputLog) -> None:
        """Send the metrics once a second, and log a throughput line now and then."""
        while True:
            now = time.monotonic()
            self._check_workers(now)
            self._send_stats(now)
            if line := log.line(now):
                logger.info(line)
            await asyncio.sleep(HEARTBEAT_S)

    def _send_stats(self, now: float) -> None:
        scheduler = self._scheduler
        self.metrics.set_load(scheduler.num_running, scheduler.num_waiting, scheduler.pool.used, scheduler.pool.size)
        stats = RouterStats(now, self._step_age(now), self.metrics.snapshot(), self._has_workers)
        self._to_detokenization.send(stats)
