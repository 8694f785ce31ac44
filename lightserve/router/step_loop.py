"""The loop that keeps the workers busy: plan a step, send it, process its result. It also notices lost workers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from lightserve.ipc.worker_calls import COMPILE_GRAMMAR, WorkerCall
from lightserve.messages.control import EngineInfo
from lightserve.messages.params import GrammarSpec
from lightserve.messages.step import Step, StepResult
from lightserve.messages.worker_calls import CompileGrammar
from lightserve.router.kv.source import KvSource
from lightserve.router.output_processor import OutputProcessor
from lightserve.router.scheduler import Scheduler, background_pause_s, next_deadline_s
from lightserve.router.step_pacer import StepKind, StepPacer, kind_of
from lightserve.router.workers.client import ModelClient
from lightserve.utils.trace_recorder import TraceRecorder

Request = TypeVar("Request")
Reply = TypeVar("Reply")

CRASHED_TWICE = "the model worker died twice while it computed this request; it is not tried again"


class InFlightStep(NamedTuple):
    """A step that was sent to the workers, and whose result is not back."""

    sent_s: float
    kind: StepKind
    result: asyncio.Future[StepResult]
    prompt_tokens: int  # in chunks of prompts
    sending_s: float  # how long planning and sending took


class StepLoop:
    def __init__(
        self, scheduler: Scheduler, model: ModelClient, engine: EngineInfo, output_processor: OutputProcessor
    ) -> None:
        self.pacer = StepPacer(engine.launch_lead_s)
        self.has_workers = True  # if not, requests wait for new ones
        self._scheduler = scheduler
        self._model = model
        self._engine = engine
        self._output_processor = output_processor
        self._wake = asyncio.Event()
        self._in_flight: deque[InFlightStep] = deque()  # oldest first
        self._timer: asyncio.TimerHandle | None = None  # for the next step
        self._deadline_s: float | None = None  # of the timer for a request that stops waiting for an event
        self._deadline_timer: asyncio.TimerHandle | None = None
        self.recorder: TraceRecorder | None = None  # while a profile runs
        self._num_recorded = 0
        self._holds: set[str] = set()  # why no step may be sent now
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []  # see wait_until
        self._was_full = False  # requests were left waiting after the last planned step
        self._client_waits = False  # and not only background requests
        self._connect_sources()

    @property
    def _sources(self) -> Iterable[KvSource]:
        return (source for group in self._scheduler.groups for source in group.sources)

    def _connect_sources(self) -> None:
        for number, group in enumerate(self._scheduler.groups):
            for source in group.sources:
                source.connect(self._model.kv_workers(number), self.wake)

    async def run(self) -> None:
        """Keep up to ``pipeline_depth`` steps in flight, so that the workers never wait."""
        while True:
            self._fill_pipeline()
            if not self._process_result():
                if not self._in_flight:
                    self._output_processor.report(StepResult())  # aborted requests do not wait for a step
                self._resolve_waiters()
                self._wake.clear()
                await self._wake.wait()

    def call_workers(self, call: WorkerCall[Request, Reply], request: Request) -> asyncio.Future[Reply | None]:
        """As WorkerCaller says: None if the workers are lost, as they are now if there are none."""
        if self.has_workers and not self._model.is_lost:
            return self._model.call(call, request)
        lost: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        lost.set_result(None)
        return lost

    def restart_workers(self, reason: str) -> None:
        """They cannot be used any more."""
        self._on_workers_lost(reason)

    def hold(self, reason: str) -> None:
        """Send no more steps, until ``release`` with the same reason. Requests stay as they are."""
        self._holds.add(reason)

    def release(self, reason: str) -> None:
        self._holds.discard(reason)
        self.wake()

    async def wait_idle(self) -> None:
        """Wait until no step is in flight. Without a hold, the next one may be sent at once."""
        await self.wait_until(lambda: not self._in_flight)

    async def wait_unwritten(self) -> None:
        """Wait until nobody writes into the KV pool: no step, and no copy from other memory or another engine.

        Copies go on when the steps that began them are back. With a hold, none begins.
        """
        await self.wait_idle()
        for source in self._sources:
            source.stop_writing()
        await self.wait_until(lambda: not self._in_flight and not any(source.is_writing for source in self._sources))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is true. It is asked whenever the loop has nothing more to do."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((condition, future))
        self.wake()
        await future

    def _resolve_waiters(self) -> None:
        for condition, future in self._waiters:
            if not future.done() and condition():
                future.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]

    def wake(self) -> None:
        """Something changed: a request came or left, a result is back, or the next step is due."""
        self._wake.set()

    def use_workers(self, model: ModelClient) -> None:
        """Continue with new workers, which hold no KV and no requests."""
        self._on_workers_lost("they were replaced")
        self._model = model
        self._connect_sources()
        self.has_workers = True
        self.set_sleeping(False)
        self.wake()

    def suspend_workers(self) -> None:
        """No step is in flight. The workers are about to be stopped: all KV is lost, and requests wait for new ones."""
        self.has_workers = False
        self._scheduler.recover_from_crash()
        self.set_sleeping(True)

    def set_sleeping(self, is_sleeping: bool) -> None:
        """A sleeping server generates nothing, though its workers may be there. /health says it at once."""
        self._output_processor.is_sleeping = is_sleeping
        self._output_processor.send_heartbeat(0.0, self.has_workers)

    def close_workers(self) -> None:
        """They have stopped."""
        self._model.close()

    def compile_grammar(self, grammar: GrammarSpec) -> asyncio.Future[None] | None:
        """Have the workers compile a grammar, so that the first step of its request does not wait.

        None if there are no workers: new ones compile it when the request enters. The future resolves in any case: if
        the grammar is wrong, the request fails when it enters.
        """
        if not self.has_workers or self._model.is_lost or not self._model.serves(COMPILE_GRAMMAR):
            return None
        return self._model.call(COMPILE_GRAMMAR, CompileGrammar(grammar, self._engine.eos_token_ids))

    def check_workers(self) -> None:
        """Have the workers replaced if the connection is closed or a step does not end."""
        limit_s, age_s = self._engine.step_timeout_s, self.step_age_s()
        if self._model.is_lost:
            self._on_workers_lost("the connection was closed")
        elif limit_s and age_s > limit_s:
            self._on_workers_lost(f"a step has been running for {age_s:.0f} s")

    def step_age_s(self) -> float:
        """How long the oldest step has been in flight; 0 if there is none."""
        return time.monotonic() - self._in_flight[0].sent_s if self._in_flight else 0.0

    @property
    def num_starting(self) -> int:
        """Waiting requests that the next step can admit: none if the last one left some waiting, for lack of room."""
        if self._was_full:
            return 0
        limit = self._scheduler.limits.max_running
        return sum(min(len(group.queue), limit - len(group.batch)) for group in self._scheduler.groups)

    def _fill_pipeline(self) -> None:
        self.check_workers()
        depth = 1 if self._scheduler.is_isolating_crash else self._engine.pipeline_depth
        while self.has_workers and not self._holds and len(self._in_flight) < depth:
            now = time.monotonic()
            if self._is_early(now):
                return
            step = self._plan(now)
            if step is None:
                return
            self._was_full = self._scheduler.num_waiting > 0
            self._client_waits = any(group.queue.num_of_clients for group in self._scheduler.groups)
            planned_s = 0.0 if self.recorder is None else time.monotonic()
            self._send(step, now)
            if self.recorder is not None:
                self.recorder.add("plan", now, planned_s, **_changes(step))
                self.recorder.add("send", planned_s, time.monotonic(), requests=step.num_rows)

    def _is_early(self, now: float) -> bool:
        """Whether it is too early for the next step. If so, a timer wakes the loop when the step is due."""
        wait_s = self._due_s(now) - now
        if wait_s <= 0:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if math.isinf(wait_s) else asyncio.get_running_loop().call_later(wait_s, self.wake)
        return True

    def _due_s(self, now: float) -> float:
        """When to send the next step; inf: when the one in flight is back."""
        if self._scheduler.limits.num_stages > 1:
            return now  # the first stage of a pipeline would be idle
        pause_s = background_pause_s(self._scheduler.groups, now)
        if pause_s is not None:
            return math.inf if self._in_flight else self.pacer.last_end_s + pause_s
        if not self._in_flight or self._client_waits:
            return now
        last = self._in_flight[-1]
        return self.pacer.send_at(last.kind, last.sent_s)

    def _plan(self, now: float) -> Step | None:
        scheduler, metrics = self._scheduler, self._output_processor.metrics
        preemptions, evicted = scheduler.num_preemptions, _num_evicted(scheduler)
        step = scheduler.next_step(now)
        metrics.preempted(scheduler.num_preemptions - preemptions)
        metrics.evicted(_num_evicted(scheduler) - evicted)
        self._set_deadline(next_deadline_s(scheduler.groups), now)
        return step

    def _set_deadline(self, deadline_s: float | None, now: float) -> None:
        """Wake the loop when a request stops waiting for an event: nothing else may happen."""
        if deadline_s == self._deadline_s:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_s = deadline_s
        if deadline_s is not None:
            self._deadline_timer = asyncio.get_running_loop().call_later(max(deadline_s - now, 0.0), self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_s = None  # the timer may be early: then it is set again
        self.wake()

    def _send(self, step: Step, now: float) -> None:
        tokens, prompt_tokens = step.num_tokens, step.num_prompt_tokens
        result = self._model.run(step)
        result.add_done_callback(lambda _: self.wake())
        kind = kind_of(tokens, prompt_tokens, step.num_drafts)
        sending_s = time.monotonic() - now
        self._in_flight.append(InFlightStep(now, kind, result, prompt_tokens, sending_s))
        self._output_processor.metrics.step(tokens)
        for number, (group, group_step) in enumerate(zip(self._scheduler.groups, step.groups or [step], strict=True)):
            for source in group.sources:
                source.on_sent(group_step, self._model.kv_workers(number))

    def _process_result(self) -> bool:
        """Process the result of the oldest step in flight. Returns False if it is not back."""
        if not self._in_flight or not self._in_flight[0].result.done():
            return False
        first = self._in_flight[0]
        if first.result.exception() is not None:  # its workers died: _fill_pipeline handles that
            return self._model.is_lost
        self._in_flight.popleft()
        now = time.monotonic()
        seconds = self.pacer.record(first.kind, first.sent_s, now)
        for source in self._sources:
            source.observe_step(first.prompt_tokens, seconds)
        for timeline, tokens in self._scheduler.complete_step(seconds):
            timeline.prefill(first.sent_s, now, tokens)
        result = first.result.result()
        self.pacer.record_lead(first.kind, first.sending_s + result.launch_s)
        self._output_processor.report(result)
        if self.recorder is not None:
            self._record(self.recorder, first, now)
        return True

    def _record(self, recorder: TraceRecorder, step: InFlightStep, now: float) -> None:
        """Steps that are in flight at the same time are on different tracks."""
        recorder.add("report tokens", now, time.monotonic())
        self._num_recorded += 1
        track = f"steps in flight {self._num_recorded % self._engine.pipeline_depth}"
        recorder.add_on(track, "prefill step" if step.prompt_tokens else "decode step", step.sent_s, now)

    def _on_workers_lost(self, reason: str) -> None:
        """All KV is lost. The crashing request fails if it is known; the others wait for new workers."""
        if not self.has_workers:
            return
        self.has_workers = False
        crashing_request = self._scheduler.recover_from_crash()
        self._in_flight.clear()
        self._model.request_restart(reason, caused_by_request=crashing_request is not None)
        if crashing_request is not None:
            self._output_processor.fail([crashing_request], 500, lambda _: CRASHED_TWICE)
        self._output_processor.send_heartbeat(0.0, has_workers=False)  # /health should not wait for the next one


def _num_evicted(scheduler: Scheduler) -> int:
    return sum(group.pool.num_evicted for group in scheduler.groups)


def _changes(step: Step) -> dict[str, int]:
    steps = step.groups or [step]
    return {
        "new": sum(len(group_step.new) for group_step in steps),
        "freed": sum(len(group_step.free) for group_step in steps),
    }
