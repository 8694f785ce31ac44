"""The scheduler's interface to the router's loop, the offline LLM and the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import BLOCK, NO_INT32, Int64Array, int32s, int64s
from lightserve.messages.params import FinishReason
from lightserve.messages.step import NewReq, ReqFailed, Step, TokenColumns, TokenOut
from lightserve.router.crash_isolation import CrashIsolation
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.pushes import KvPushes
from lightserve.router.kv.source import Activity, KvSource, StepPart
from lightserve.router.parents import Parents
from lightserve.router.policy import Fifo, Policy
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue
from lightserve.router.scheduler.admission import AdmissionControl
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.chunking import Chunking
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.lora_slots import LoraSlots
from lightserve.router.scheduler.planner import PlannedStep, PrefillChunk, StepPlanner
from lightserve.router.scheduler.preemption import Preemption
from lightserve.router.token_budget import OutputEstimate


class ReqTokens(NamedTuple):
    """The tokens that a request has got from a step. The last of them may have ended it."""

    req: Req
    outs: Sequence[TokenOut]


class Scheduler:
    def __init__(
        self,
        pool: KvPool,
        limits: SchedulerLimits,
        policy: Policy | None = None,
        estimate: OutputEstimate | None = None,
        loras: LoraSlots | None = None,
    ) -> None:
        self.pool = pool
        self.loras = loras or LoraSlots()
        self.limits = limits
        policy = policy or Fifo()
        self.queue = ReqQueue(policy)
        self.isolation = CrashIsolation()
        self._batch = RunningBatch(pool, self.isolation, self.loras, limits.max_running)
        self._estimate = estimate or OutputEstimate()
        self._chunking = Chunking(limits, policy, pool.max_chunk)
        self.preemption = Preemption(self._batch, self.queue, policy)
        self._in_flight: deque[PlannedStep] = deque()  # oldest first
        self._planner = StepPlanner(self.queue, self._batch, self._chunking, self.preemption, limits)
        self.num_forced = 0  # tokens that followed a sampled one in the same result, and were not drafts
        self.parents = Parents()
        self.pushes = KvPushes()
        self.sources: list[KvSource] = []  # of KV, besides the workers' computing it
        self.parts: list[StepPart] = [self.pushes]  # of steps
        self._admission = AdmissionControl(
            self.queue, self._batch, self._chunking, limits, self._estimate, self.sources
        )

    def add_source(self, source: KvSource) -> None:
        """KV may come from there too. Requests ask the sources in this order."""
        self.sources.append(source)
        self.parts.append(source)

    @property
    def groups(self) -> Sequence[Scheduler]:
        """Of all attention groups: see LockstepScheduler."""
        return (self,)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room only."""
        return len(self.queue)

    @property
    def num_blocked(self) -> int:
        """Requests that wait for an event: for KV, an adapter, a prefix, or to be released."""
        return self.queue.num_blocked

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_preemptions(self) -> int:
        return self.preemption.count

    @property
    def is_isolating_crash(self) -> bool:
        """If so, no step may be planned before the tokens of the last are back: see CrashIsolation."""
        return self.isolation.is_active

    def add(self, req: Req) -> None:
        self.parents.give_keys(req)
        self.queue.add(req)
        self._wait_for_tokens(req)

    def has_in_flight(self, req_id: int) -> bool:
        """Whether a step in flight computes a request with this id, which may have been dropped."""
        return any(req_id in step.req_ids for step in self._in_flight)

    def _wait_for_tokens(self, req: Req) -> None:
        """A request that moved away may come back before the tokens of its last steps, and must not get them again."""
        steps = [step for step in self._in_flight if req.req_id in step.req_ids]
        if steps:
            self.queue.block(req, steps[-1].completed)

    def hold(self, req: Req) -> None:
        """Queue a request that may not be admitted before ``release``: the workers prepare its grammar or adapter."""
        self.parents.give_keys(req)
        self.queue.hold(req)

    def release(self, req: Req) -> None:
        """Let a held request be admitted. Nothing happens if it has ended."""
        self.queue.release(req)
        if self.queue.is_ready(req):
            self._wait_for_tokens(req)

    def needs_on_host(self, lora_id: int) -> bool:
        """Whether a step in flight, or the next one, copies this adapter to the device."""
        return self.loras.is_copied(lora_id) or any(lora_id in step.loras for step in self._in_flight)

    def next_step(self, now_s: float = 0.0) -> Step | None:
        """What to compute next; None if there is nothing beyond the steps in flight."""
        self.preemption.make_room()
        admitted = {req: self.parents.as_new(req, self.pool.new_group_slots(req)) for req in self._admit(now_s)}
        for part in self.parts:
            part.begin_step()
        planned = self._planner.plan()
        self._admission.prefixes.wake()  # what is planned now can be used by the next step
        computes = bool(len(planned.rows)) or any(req in self._batch for req in admitted)
        for part in self.parts:
            part.take(planned.transfers, self._activity(computes))
        if not computes and not planned.transfers and (len(self._batch) or not self._has_to_free):
            return None  # freed rows can wait for the next step, unless there will be none
        self._in_flight.append(planned)
        return self._as_step(planned, admitted)

    def _admit(self, now_s: float) -> list[Req]:
        admitted = self._admission.admit(now_s)
        for req in admitted:
            for part in self.parts:
                part.on_admitted(req)
        return admitted

    def _activity(self, computes: bool) -> Activity:
        if computes:
            return Activity.COMPUTING
        has_reqs = len(self._batch) or len(self.queue) or self.num_blocked
        return Activity.WAITING if has_reqs else Activity.IDLE

    def _as_step(self, planned: PlannedStep, admitted: dict[Req, NewReq]) -> Step:
        new, free = self._batch.take_new_and_freed(admitted)
        kept, dropped = self.parents.take_kept_and_dropped(free)
        loras = self.loras.take_copies()
        planned.loras.extend(place.lora_id for place in loras)
        return Step(
            planned.chunks(),
            [admitted[req] for req in new],
            free,
            kept=kept,
            dropped=dropped,
            group_slots=planned.group_slots,
            decode_ids=planned.req_ids[: planned.num_decodes],
            decode_slots=planned.slots[: planned.decodes.num_slots],
            slot_counts=planned.decodes.slot_counts,
            draft_counts=planned.decodes.draft_counts,
            loras=loras,
            stores=planned.transfers.stores,
            loads=planned.transfers.loads,
            token_ids=planned.token_ids,
            pushes=planned.transfers.pushes,
            expects=planned.transfers.expects,
        )

    @property
    def _has_to_free(self) -> bool:
        """Whether the workers hold or keep something that is not needed any more."""
        return self._batch.has_rows_to_free or self.parents.has_drops

    def complete_step(self, seconds: float | None = None) -> list[PrefillChunk]:
        """The oldest step in flight is back: the KV that it computed is certain. Returns its prompt chunks.

        ``seconds``: how long it took, if that is known.
        """
        step = self._in_flight.popleft()
        if seconds is not None and len(step.counts) > step.num_decodes:
            self._chunking.cost.observe(*step.work(), seconds)
        columns = self._batch.columns
        runs_on = columns.admission[step.rows] == step.admissions  # it has not left since
        columns.certain_len[step.rows[runs_on]] = step.planned_len[runs_on]
        if len(step.decodes.draft_counts):
            is_here = runs_on[: step.num_decodes]
            columns.planned_drafts[step.decodes.rows[is_here]] -= step.decodes.draft_counts[is_here]
        for part in self.parts:
            part.on_completed(step.transfers)
        step.completed.end()
        return step.prefills

    def process_plain(self, tokens: TokenColumns) -> npt.NDArray[np.bool_]:
        """Give these requests their tokens, if none of them is the first or perhaps the last.

        Returns which requests have got theirs. ``process_req`` takes the others.
        """
        columns, counts = self._batch.columns, int32s(tokens.counts)
        found = self._batch.rows_of(int64s(tokens.req_ids))
        rows = np.maximum(found, 0)
        begin = columns.output_len[rows]
        end = begin + (counts if len(counts) else 1)
        is_inside = (begin > 0) & (end < columns.max_new_tokens[rows]) & (begin < columns.planned_outputs[rows])
        is_known: npt.NDArray[np.bool_] = (
            (found >= 0) & (columns.is_plain[rows] > 0) & is_inside & ~self._batch.may_end(tokens)
        )
        if self.isolation.is_active:
            is_known[:] = False
        if len(counts):
            is_known &= counts <= BLOCK
        known, rows = (tokens, rows) if is_known.all() else (tokens.where(is_known), rows[is_known])
        self._batch.add_outputs(rows, known.token_ids, known.counts)
        if len(counts):
            self.num_forced += int((known.counts - 1)[columns.has_drafted[rows] == 0].sum())
        return is_known

    def runs(self, req_ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these requests run."""
        is_running: npt.NDArray[np.bool_] = self._batch.rows_of(req_ids) >= 0
        return is_running

    def observe_gaps(self, req_ids: Int64Array, now: float) -> tuple[list[float], list[int]]:
        """These requests, which run, have got a token now. Returns the times since their last ones, and how often."""
        columns, rows = self._batch.columns, self._batch.rows_of(req_ids)
        last_s = columns.last_token_s[rows]
        columns.last_token_s[rows] = now
        if len(last_s) and bool((last_s == last_s[0]).all()):  # as usual: 5 us instead of 30
            return [now - last_s.item(0)], [len(last_s)]
        last_s, counts = np.unique(last_s, return_counts=True)
        return (now - last_s).tolist(), counts.tolist()

    def process_req(self, outs: Sequence[TokenOut]) -> ReqTokens | None:
        """Give a request the tokens of a step, and release it if it is finished. None if it has ended before."""
        req_id = outs[0].req_id
        req = self._batch.find(req_id) or self.queue.find_preempted(req_id)
        if req is None or not req.in_flight:  # it ended or was aborted meanwhile
            return None
        added = req.add_tokens(outs)
        self.num_forced += 0 if req.has_drafted else len(added) - 1
        if self.isolation.is_active:
            self.isolation.clear(req)
        if req.finish_reason is not None:
            if req.max_new_tokens > 1:  # a beam search makes requests of one token: they would spoil the estimate
                self._estimate.observe(req.output_len)
            if req.may_be_parent:
                self.parents.add(req, is_in_workers=req in self._batch)
            self._drop(req)
        return ReqTokens(req, added)

    def process_embedding(self, req_id: int) -> Req | None:
        """The result of a pooling request is back, which ends it. None if it has ended before."""
        req = self._batch.find(req_id) or self.queue.find_preempted(req_id)
        if req is None or not req.in_flight:
            return None
        req.finish_reason = FinishReason.STOP
        self._drop(req)
        return req

    def fail(self, failure: ReqFailed) -> Req | None:
        """End a request that failed in a step. None if it has ended before."""
        req = self._batch.find(failure.req_id) or self.queue.find_preempted(failure.req_id)
        if req is None or not req.in_flight:
            return None
        req.fail()
        self._drop(req)
        if failure.status >= 500:
            self.pool.discard(req)
        return req

    def abort(self, req_id: int) -> Req | None:
        """Drop a request, whether it waits or runs. None if it has ended."""
        req = self._batch.find(req_id) or self.queue.find(req_id)
        if req is not None:
            self._drop(req)
        return req

    def drop(self, is_meant: Callable[[Req], bool]) -> list[Req]:
        """Drop requests, whether they wait or run, and return them."""
        dropped = [req for req in (*self.queue, *self._batch) if is_meant(req)]
        for req in dropped:
            self._drop(req)
        return dropped

    def cancel_steps(self) -> None:
        """The steps in flight failed, and the workers have freed all requests. Drops all requests.

        It is unknown what those steps computed, so their slots are freed, also those in the prefix cache.
        """
        for req in self._batch:
            req.roll_back()
        self.drop(lambda req: True)
        slots = np.concatenate([NO_INT32, *(step.slots for step in self._in_flight)])
        group_slots = [
            np.concatenate([NO_INT32, *(step.group_slots[group] for step in self._in_flight)])
            for group in range(len(self.pool.groups))
        ]
        self.pool.roll_back(slots, group_slots)
        self._in_flight.clear()
        self._batch.clear()
        self.parents.clear()

    def reset(self) -> None:
        """Drop all requests and all KV. The workers have freed all requests."""
        self.queue.clear()
        self._batch.clear()
        self.isolation.reset()
        self._in_flight.clear()
        self.pushes.clear()
        self.parents.clear()
        self.pool.reset()

    def recover_from_crash(self) -> Req | None:
        """The workers died. All requests continue from their tokens in new workers, which hold no KV.

        Returns the crashing request if it is known; it is dropped.
        """
        in_flight = {req_id for step in self._in_flight for req_id in step.req_ids.tolist()}
        self._in_flight.clear()
        self.pool.reset()
        self.parents.lose_workers()
        self.queue.end_waits()
        for req in self._batch.clear():
            self.queue.add_preempted(req)
            req.timeline.paused("workers_lost", req.output_len)
        for req in self.queue:
            req.reset_kv()
        crashing_request = self.isolation.record_crash([req for req in self.queue if req.req_id in in_flight])
        if crashing_request is not None:
            self._drop(crashing_request)
        return crashing_request

    def _drop(self, req: Req) -> None:
        self.isolation.clear(req)
        for part in self.parts:
            part.drop(req)
        if req in self._batch:
            self._batch.release(req)
        else:
            self.queue.remove(req)
        if req.lora_id is not None:
            self.loras.on_leave(req.lora_id)
