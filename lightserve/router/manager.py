"""The router's only loop: receive, schedule, run, report."""

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
from lightserve.router.pace import Kind, Pace, kind_of
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler
from lightserve.router.stats import RouterMetrics, ThroughputLog
from lightserve.utils.channel import Receiver, Sender
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

HEARTBEAT_S = 1.0
DEADLINE_CHECK_S = 0.25


KILLER = "the model worker died twice while it computed this request; it is not tried again"


class UnderWay(NamedTuple):
    """A step that the workers were sent."""

    sent_s: float
    step: Step
    kind: Kind
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
        self._may_go_on = asyncio.Event()  # something happened: a request, an answer, the time to send a step
        self._under_way: deque[UnderWay] = deque()
        self._pace = Pace()
        self._timer: asyncio.TimerHandle | None = None
        self._was_full = False  # the last step that was planned: some had to wait for another
        self._has_workers = True  # else requests wait for new ones
        self._gone: list[int] = []  # aborted since the last report
        self.metrics = RouterMetrics()

    async def run(self, log: ThroughputLog) -> None:
        """Serve for ever: when the workers die, requests wait until ``use`` brings others."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._step_on())
            tasks.create_task(self._beat(log))
            tasks.create_task(self._watch_deadlines())

    def use(self, model: ModelClient) -> None:
        """Go on with new workers, which know nothing, in place of those that were lost."""
        self._lose_workers("they were replaced")
        self._model = model
        self._has_workers = True
        self.metrics.restarted()
        self._may_go_on.set()

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
        self._scheduler.add(self._req_of(message))
        self._may_go_on.set()

    def _req_of(self, message: GenerateReq) -> Req:
        scheduling = message.scheduling
        timeout_s = scheduling.timeout_s or self._config.request_timeout or None
        shares = scheduling.use_cache and not self._config.disable_dynamic_prompt_cache
        return Req(
            message.req_id,
            message.prompt_ids,
            message.params,
            message.params.stopping.max_new_tokens,
            self._engine.eos_token_ids,
            arrived_s=message.arrived_s,
            priority=scheduling.priority,
            deadline_s=None if timeout_s is None else message.arrived_s + timeout_s,
            salt=f"salt {scheduling.cache_salt}" if shares else f"group {message.group}",  # choices share in any case
        )

    def _abort(self, message: AbortReq) -> None:
        req = self._scheduler.abort(message.req_id)
        if req is None:  # it ended by itself meanwhile
            return
        self._gone.append(message.req_id)
        self._note_finished(req, message.reason.value, time.monotonic())
        self._may_go_on.set()

    async def _step_on(self) -> None:
        """Keep the workers busy: up to ``pipeline_depth`` steps are under way."""
        while True:
            self._fill_pipeline()
            if not self._take_answer():
                if not self._under_way:
                    self._report(StepResult())
                self._may_go_on.clear()
                await self._may_go_on.wait()

    def _take_answer(self) -> bool:
        """That of the first step under way, if it is there."""
        if not self._under_way or not self._under_way[0].result.done():
            return False
        first = self._under_way[0]
        if first.result.exception() is not None:  # its workers died; they are missed when the pipeline is filled
            return self._model.is_lost
        self._under_way.popleft()
        self._pace.done(first.kind, first.sent_s, time.monotonic())
        self._report(first.result.result())
        return True

    def _fill_pipeline(self) -> None:
        self._check_workers(time.monotonic())
        depth = 1 if self._scheduler.has_suspects else self._engine.pipeline_depth
        while self._has_workers and len(self._under_way) < depth:
            now = time.monotonic()
            if self._under_way and not self._was_full and self._is_early(self._under_way[-1], now):
                return
            step = self._plan(now)
            if step is None:
                return
            self._was_full = self._scheduler.num_waiting > 0
            count = sum(len(row.slots) for row in step.rows)
            result = self._model.run(step)
            result.add_done_callback(lambda _: self._may_go_on.set())
            self._under_way.append(UnderWay(now, step, kind_of(count, len(step.rows)), result))
            self.metrics.step(count)

    def _is_early(self, last: UnderWay, now: float) -> bool:
        """Whether the next step can wait; when it no longer can, this is asked again."""
        wait_s = self._pace.send_at(last.kind, last.sent_s) - now
        if wait_s <= 0:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._may_go_on.set)
        return True

    def _plan(self, now: float) -> Step | None:
        scheduler = self._scheduler
        pauses, evicted = scheduler.num_pauses, scheduler.pool.num_evicted
        step = scheduler.next_step(now)
        self.metrics.preempted(scheduler.num_pauses - pauses)
        self.metrics.evicted(scheduler.pool.num_evicted - evicted)
        return step

    def _check_workers(self, now: float) -> None:
        """Notice that they are lost, or that a step does not end, which comes to the same."""
        limit_s = self._engine.step_timeout_s
        if self._model.is_lost:
            self._lose_workers("it hung up")
        elif limit_s and self._step_age(now) > limit_s:
            self._lose_workers(f"a step has been running for {self._step_age(now):.0f} s")

    def _lose_workers(self, why: str) -> None:
        """All KV is gone; so is the request that is to blame, if one is."""
        if not self._has_workers:
            return
        self._has_workers = False
        culprit = self._scheduler.lose_kv({row.req_id for one in self._under_way for row in one.step.rows})
        self._under_way.clear()
        self._model.give_up(why, is_explained=culprit is not None)
        if culprit is not None:
            self._fail([ReqFailed(culprit.req_id, 500, KILLER)])
        self._tell_stats(time.monotonic())  # /health should know before the next second

    def _fail(self, failed: list[ReqFailed]) -> None:
        self._to_detokenization.send(BatchTokenIdOut(failed=failed))
        self.metrics.failed(len(failed))

    def _step_age(self, now: float) -> float:
        return now - self._under_way[0].sent_s if self._under_way else 0.0

    def _report(self, result: StepResult) -> None:
        """One message with all tokens of a step, and who is gone since the last."""
        now = time.monotonic()
        gaps: dict[float, int] = {}  # when the last token was -> how many requests; one step serves most of them
        failed = [failure for failure in result.failed if self._scheduler.fail(failure) is not None]
        outs = []
        for out in result.tokens:
            req = self._scheduler.take_one(out)
            if req is None:
                continue
            admission = None
            if len(req.output_ids) == 1:
                admission = self._note_first_token(req, now)
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
                self._note_finished(req, req.finish_reason.value, now)
        for last_token_s, count in gaps.items():
            self.metrics.next_tokens(now - last_token_s, count)
        self.metrics.failed(len(failed))
        self.metrics.not_numbers(sum(failure.status >= 500 for failure in failed))
        if outs or failed or self._gone:
            self._to_detokenization.send(BatchTokenIdOut(outs, failed=failed, aborted=self._gone))
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
                self._fail([ReqFailed(req.req_id, 504, "the request took longer than its timeout") for req in expired])
                self._may_go_on.set()

    async def _beat(self, log: ThroughputLog) -> None:
        """Once a second: a sign of life with the metrics, now and then a line in the log."""
        while True:
            now = time.monotonic()
            self._check_workers(now)
            self._tell_stats(now)
            if line := log.line(now):
                logger.info(line)
            await asyncio.sleep(HEARTBEAT_S)

    def _tell_stats(self, now: float) -> None:
        scheduler = self._scheduler
        self.metrics.set_load(scheduler.num_running, scheduler.num_waiting, scheduler.pool.used, scheduler.pool.size)
        stats = RouterStats(now, self._step_age(now), self.metrics.snapshot(), self._has_workers)
        self._to_detokenization.send(stats)
