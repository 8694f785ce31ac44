"""What the ranks of one attention group compute in a step. Without data-parallel attention there is one such group.

A group has a KV pool, a prefix cache and a queue. Its requests stay in it until they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import BLOCK, NO_INT32, Int64Array, int32s, int64s
from lightserve.messages.step import DraftColumns, NewReq, Step, TokenColumns
from lightserve.router.crash_isolation import CrashIsolation
from lightserve.router.fork_points import ForkPoints
from lightserve.router.images.image_waits import ImageWaits
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.sends import KvSends
from lightserve.router.kv.source import Activity, KvSource, StepPart
from lightserve.router.policy import Fifo, Policy
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue
from lightserve.router.scheduler.admission import AdmissionControl
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.chunking import Chunking
from lightserve.router.scheduler.draft_policy import draft_cost, observe_drafts
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.lora_slots import LoraSlots
from lightserve.router.scheduler.past_outputs import PastOutputs
from lightserve.router.scheduler.planner import PlannedStep, StepPlanner
from lightserve.router.scheduler.preemption import Preemption
from lightserve.router.token_budget import OutputEstimate


class GroupStep(NamedTuple):
    planned: PlannedStep
    message: Step  # to the workers


class GroupScheduler:
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
        self.batch = RunningBatch(pool, self.isolation, self.loras, limits.max_running)
        self._estimate = estimate or OutputEstimate()
        self.chunking = Chunking(limits, policy, pool.max_chunk)
        self.preemption = Preemption(self.batch, self.queue, policy)
        self.planner = StepPlanner(self.queue, self.batch, self.chunking, self.preemption, limits)
        self.num_forced = 0  # tokens that followed a sampled one in the same result, and were not drafts
        self.fork_points = ForkPoints()
        self.past_outputs = PastOutputs(limits.past_outputs)
        self.sends = KvSends(pool.groups)
        self.sources: list[KvSource] = []  # of KV, besides the workers' computing it
        self.parts: list[StepPart] = [self.sends]  # of steps
        self.images: ImageWaits | None = None  # None: this server reads none
        self.admission = AdmissionControl(self.queue, self.batch, self.chunking, limits, self._estimate, self.sources)

    def add_source(self, source: KvSource) -> None:
        """KV may come from there too. Requests ask the sources in this order."""
        self.sources.append(source)
        self.parts.append(source)

    def enable_images(self, images: ImageWaits) -> None:
        """Requests may have images. Other groups use the same encoders."""
        self.images = images
        self.admission.further_waits.append(
            lambda req: images.wait_of(req, self.pool.cached_len(req)) if req.images else None
        )
        self.parts.append(images)

    def plan(self, now_s: float) -> GroupStep | None:
        """What to compute next; None if there is nothing beyond the steps in flight."""
        self.preemption.make_room()
        admitted = {req: self._as_new(req) for req in self._admit(now_s)}
        if self.has_ready_client:
            self.planner.background.on_client(now_s)
        for step_part in self.parts:
            step_part.begin_step()
        planned = self.planner.plan(now_s)
        planned.is_alone = not self._is_encoding
        self.admission.prefixes.wake()  # what is planned now can be used by the next step
        computes = bool(len(planned.rows)) or any(req in self.batch for req in admitted)
        for step_part in self.parts:
            step_part.take(planned.transfers, self._activity(computes))
        if not computes and not planned.transfers and (len(self.batch) or not self._has_to_free):
            return None  # freed rows can wait for the next step, unless there will be none
        return GroupStep(planned, self._as_step(planned, admitted))

    @property
    def has_ready_client(self) -> bool:
        """Whether a request runs, or waits for room, that is not a background request."""
        return bool(self.queue.num_of_clients) or len(self.batch) > self.batch.num_background

    @property
    def has_client(self) -> bool:
        """Whether there is any request that is not a background request."""
        is_blocked = self.queue.num_blocked and not all(req.is_background for req in self.queue)
        return self.has_ready_client or bool(is_blocked)

    @property
    def _is_encoding(self) -> bool:
        """Whether an encoder may be using the device."""
        return self.images is not None and self.images.is_encoding

    def _admit(self, now_s: float) -> list[Req]:
        admitted = self.admission.admit(now_s)
        while self.admission.client_lacks_room and self.preemption.preempt_background():
            admitted += self.admission.admit(now_s)
        admitted = [req for req in admitted if req in self.batch]
        for req in admitted:
            for step_part in self.parts:
                step_part.on_admitted(req)
        return admitted

    def _as_new(self, req: Req) -> NewReq:
        new = self.past_outputs.predict(req, self.fork_points.as_new(req, self.pool.groups.held_slots(req)))
        for step_part in self.parts:
            new = step_part.as_new(req, new)
        return new

    def _activity(self, computes: bool) -> Activity:
        if computes:
            return Activity.COMPUTING
        has_reqs = len(self.batch) or len(self.queue) or self.queue.num_blocked
        return Activity.WAITING if has_reqs else Activity.IDLE

    def _as_step(self, planned: PlannedStep, admitted: dict[Req, NewReq]) -> Step:
        new, free = self.batch.take_new_and_freed(admitted)
        retain, release = self.fork_points.take_retained_and_released(free)
        loras = self.loras.take_copies()
        planned.loras.extend(lora.lora_id for lora in loras)
        return Step(
            planned.chunks(),
            [admitted[req] for req in new],
            free,
            retain=retain,
            release=release,
            group_slots=planned.group_slots,
            snapshots=planned.snapshots,
            decode_ids=planned.req_ids[: planned.num_decodes],
            decode_slots=planned.slots[: planned.decodes.num_slots],
            slot_counts=planned.decodes.slot_counts,
            draft_counts=planned.decodes.draft_counts,
            next_drafts=planned.next_drafts,
            loras=loras,
            stores=planned.transfers.stores,
            loads=planned.transfers.loads,
            token_ids=planned.token_ids,
            ready_lens=planned.ready_lens,
            sends=planned.transfers.sends,
            recvs=planned.transfers.recvs,
        )

    @property
    def _has_to_free(self) -> bool:
        """Whether the workers hold or keep something that is not needed any more."""
        return self.batch.has_rows_to_free or self.fork_points.has_releases

    def complete(self, step: PlannedStep, seconds: float | None) -> None:
        """The step is back: the KV that it computed is certain. ``seconds``: how long it took, if that is known."""
        if seconds is not None and len(step.counts) > step.num_decodes:
            self.chunking.observe(*step.work(), seconds, step.is_alone and not self._is_encoding)
        if seconds is not None and len(step.counts):
            self.planner.background.on_step(step.num_background, seconds)
        columns = self.batch.columns
        is_still_running = columns.admission[step.rows] == step.admissions  # it has not left since
        columns.certain_len[step.rows[is_still_running]] = step.planned_len[is_still_running]
        if len(step.decodes.draft_counts):
            is_here = is_still_running[: step.num_decodes]
            columns.planned_drafts[step.decodes.rows[is_here]] -= step.decodes.draft_counts[is_here]
        for step_part in self.parts:
            step_part.on_completed(step.transfers)
        step.completed.end()

    def process_plain(self, tokens: TokenColumns) -> npt.NDArray[np.bool_]:
        """Give these requests their tokens, if none of them is the first or perhaps the last.

        Returns which requests have got theirs.
        """
        columns, counts = self.batch.columns, int32s(tokens.counts)
        batch_rows = self.batch.rows_of(int64s(tokens.req_ids))
        rows = np.maximum(batch_rows, 0)
        begin = columns.output_len[rows]
        end = begin + (counts if len(counts) else 1)
        is_inside = (begin > 0) & (end < columns.max_new_tokens[rows]) & (begin < columns.planned_outputs[rows])
        is_known: npt.NDArray[np.bool_] = (
            (batch_rows >= 0) & (columns.is_plain[rows] > 0) & is_inside & ~self.batch.may_end(tokens)
        )
        if self.isolation.is_active:
            is_known[:] = False
        if len(counts):
            is_known &= counts <= BLOCK
        known, rows = (tokens, rows) if is_known.all() else (tokens.where(is_known), rows[is_known])
        if len(counts):
            self.num_forced += int(np.maximum(known.counts - 1 - columns.num_accepted[rows], 0).sum())
        self.batch.add_outputs(rows, known.token_ids, known.counts)
        return is_known

    def observe_drafts(self, drafts: DraftColumns) -> None:
        """Learn how many drafts its requests should have, and how many of their next tokens are drafts."""
        req_ids = int64s(drafts.req_ids)
        rows = self.batch.rows_of(req_ids)
        is_here = rows >= 0
        self.batch.columns.num_accepted[rows[is_here]] = int32s(drafts.accepted)[is_here]
        for index in np.flatnonzero(~is_here).tolist():
            if (req := self.queue.find_preempted(int(req_ids[index]))) is not None:
                req.num_accepted = int(drafts.accepted[index])
        cost = draft_cost(len(self.batch), self.limits.weight_read_tokens)
        observe_drafts(self.batch.columns, rows[is_here], drafts.where(is_here), cost)

    def take_proposals(self, proposals: TokenColumns) -> None:
        """Drafts that the last stage of a pipeline has found for the next steps of its requests."""
        rows = self.batch.rows_of(int64s(proposals.req_ids))
        self.batch.columns.take_proposals(rows[rows >= 0], proposals.where(rows >= 0))

    def observe_first_token(self, req: Req, seconds: float) -> None:
        """A request, perhaps of another group, has got its first token so long after its admission."""
        if not req.is_background:
            self.planner.background.on_first_token(seconds)

    def runs(self, req_ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these requests run."""
        is_running: npt.NDArray[np.bool_] = self.batch.rows_of(req_ids) >= 0
        return is_running

    def observe_gaps(self, req_ids: Int64Array, now: float) -> tuple[list[float], list[int]]:
        """These requests, which run, have got a token now. Returns the times since their last ones, and how often."""
        columns, rows = self.batch.columns, self.batch.rows_of(req_ids)
        last_s = columns.last_token_s[rows]
        columns.last_token_s[rows] = now
        if len(last_s) and bool((last_s == last_s[0]).all()):  # as usual: 5 us instead of 30
            return [now - last_s.item(0)], [len(last_s)]
        last_s, counts = np.unique(last_s, return_counts=True)
        return (now - last_s).tolist(), counts.tolist()

    def find(self, req_id: int) -> Req | None:
        """A request that waits or runs here."""
        return self.batch.find(req_id) or self.queue.find(req_id)

    def find_in_flight(self, req_id: int) -> Req | None:
        """The request that a result belongs to; None: it is not here, or has ended meanwhile."""
        req = self.batch.find(req_id) or self.queue.find_preempted(req_id)
        return None if req is None or not req.in_flight else req

    def finish(self, req: Req) -> None:
        """The request has got its last token."""
        if req.max_new_tokens > 1:  # a beam search makes requests of one token: they would spoil the estimate
            self._estimate.observe(req.output_len)
        self.past_outputs.add(req)
        if req.can_fork:
            self.fork_points.add(req, is_in_workers=req in self.batch)
        self.drop(req)

    def drop(self, req: Req) -> None:
        """The request, which waits or runs here, leaves."""
        self.isolation.clear(req)
        for step_part in self.parts:
            step_part.drop(req)
        if req in self.batch:
            self.batch.release(req)
        else:
            self.queue.remove(req)
        if req.lora_id is not None:
            self.loras.on_leave(req.lora_id)

    def cancel(self, steps: Sequence[PlannedStep]) -> None:
        """These steps in flight failed: see ``Scheduler.cancel_steps``."""
        for req in self.batch:
            req.roll_back()
        for req in (*self.queue, *self.batch):
            self.drop(req)
        slots = np.concatenate([NO_INT32, *(step.slots for step in steps)])
        group_slots = [
            np.concatenate([NO_INT32, *(step.group_slots[number] for step in steps)])
            for number in range(len(self.pool.groups))
        ]
        self.pool.roll_back(slots, group_slots)
        self.batch.clear()
        self.fork_points.clear()

    def reset(self) -> None:
        """Drop all requests and all KV. The workers have freed all requests."""
        self.queue.clear()
        self.batch.clear()
        self.isolation.reset()
        self.sends.clear()
        self.fork_points.clear()
        self.pool.reset()

    def recover_from_crash(self, steps: Sequence[PlannedStep]) -> Req | None:
        """The workers died while they computed these steps: see ``Scheduler.recover_from_crash``."""
        in_flight = {req_id for step in steps for req_id in step.req_ids.tolist()}
        self.pool.reset()
        self.fork_points.lose_workers()
        self.queue.end_waits()
        for req in self.batch.clear():
            self.queue.add_preempted(req)
            req.timeline.paused("workers_lost", req.output_len)
        for req in self.queue:
            req.reset_kv()
        crashing_request = self.isolation.record_crash([req for req in self.queue if req.req_id in in_flight])
        if crashing_request is not None:
            self.drop(crashing_request)
        return crashing_request


def background_pause_s(groups: Sequence[GroupScheduler], now_s: float) -> float | None:
    """How long to wait between the last step and the next one, which has background requests only. None: send it.

    For a while after a client's request, another one may come, and would wait for steps in flight.
    """
    if any(group.has_client for group in groups):
        return None
    limits = [group.planner.background for group in groups]
    return max((limit.pause_s for limit in limits if limit.tokens(now_s) is not None), default=None)


def next_deadline_s(groups: Sequence[GroupScheduler]) -> float | None:
    """When to plan again though nothing has happened: a request stops waiting for an event. None: none will."""
    deadlines = (group.queue.next_deadline_s() for group in groups)
    return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)
