"""Which tokens the next step computes, in which KV slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array
from lightserve.messages.step import StepRow
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.source import KvTransfers
from lightserve.router.observability.timeline import Timeline
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue, Wait
from lightserve.router.scheduler.background import BackgroundLimit
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.chunking import Chunk, Chunking
from lightserve.router.scheduler.decodes import Decodes, next_drafts, plan_drafts
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.preemption import Preemption

PrefillChunk = tuple[Timeline, int]  # of a request: how many tokens a step computes


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A step in flight. The arrays have one number per request, unless they say otherwise."""

    decodes: Decodes  # the first requests
    req_ids: Int64Array
    rows: Int64Array  # of RunningBatch
    admissions: Int64Array
    counts: Int64Array  # tokens to compute
    planned_len: Int64Array  # after the step, at least
    slots: Slots  # of all tokens, without those that requests have already
    group_slots: tuple[Slots, ...] = ()  # by KV group: see KvGroupPool.alloc
    snapshots: Int32Array = field(default_factory=lambda: NO_INT32)  # see Step
    prefills: list[PrefillChunk] = field(default_factory=list)
    token_ids: Int32Array = field(default_factory=lambda: NO_INT32)  # of all tokens, if the model is a pipeline
    next_drafts: int = 0  # see Step
    ready_lens: Int32Array = field(default_factory=lambda: NO_INT32)  # the same
    loras: list[int] = field(default_factory=list)  # adapters that it copies to the device
    transfers: KvTransfers = field(default_factory=KvTransfers)
    num_background: int = 0  # tokens of background requests
    is_alone: bool = True  # no encoder used the device when it was planned
    completed: Wait = field(default_factory=Wait)  # of requests with the ids of dropped ones, whose tokens it brings

    @property
    def num_decodes(self) -> int:
        return len(self.decodes.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    def work(self) -> tuple[int, float]:
        """Its tokens, and pairs of a prompt token and a token that it attends to."""
        counts, planned_len = self.counts[self.num_decodes :], self.planned_len[self.num_decodes :]
        return self.num_tokens, float((counts * (planned_len - counts / 2)).sum())

    def chunks(self) -> list[StepRow]:
        ends = (self.decodes.num_slots + np.cumsum(self.counts[self.num_decodes :])).tolist()
        req_ids, counts = self.req_ids[self.num_decodes :].tolist(), self.counts[self.num_decodes :].tolist()
        return [
            StepRow(req_id, self.slots[end - count : end])
            for req_id, count, end in zip(req_ids, counts, ends, strict=True)
        ]


class StepPlanner:
    def __init__(
        self,
        queue: ReqQueue,
        batch: RunningBatch,
        chunking: Chunking,
        preemption: Preemption,
        limits: SchedulerLimits,
    ) -> None:
        self.num_planned = 0  # steps so far
        self.background = BackgroundLimit(limits.batch_max_tokens)
        self._queue = queue
        self._batch = batch
        self._pool = batch.pool
        self._chunking = chunking
        self._preemption = preemption
        self._limits = limits

    def plan(self, now_s: float = 0.0) -> PlannedStep:
        """Allocate KV slots for the tokens of the next step."""
        decodes, chunks = self._chunks(now_s)
        while not (len(decodes.rows) or chunks) and self._preemption.is_stuck():
            self._preemption.preempt_newest()
            decodes, chunks = self._chunks(now_s)
        batch, columns, begin = self._batch, self._batch.columns, decodes.num_slots
        slots = self._pool.alloc(begin + sum(count for _, count in chunks))
        of_prompts = batch.at(decodes.rows[columns.planned_len[decodes.rows] < columns.prompt_len[decodes.rows]])
        group_slots = self._pool.groups.alloc(decodes.rows, decodes.slot_counts, chunks)
        batch.plan_decodes(decodes, slots[:begin])
        prefills = [self._cache_prompt(req, 1) for req in of_prompts]
        for req, count in chunks:
            is_prompt = req.planned_len < len(req.prompt_ids)
            req.plan(slots[begin : begin + count])
            begin += count
            if is_prompt:
                prefills.append(self._cache_prompt(req, count))
        rows = np.append(decodes.rows, np.array([req.row for req, _ in chunks], dtype=np.int64))
        counts = np.array([1] * len(decodes.rows) + [count for _, count in chunks], dtype=np.int64)
        if len(decodes.draft_counts):
            counts[: len(decodes.rows)] += decodes.draft_counts
        self._pool.groups.end_step(decodes.rows, chunks)
        self.num_planned += 1
        columns.planned_step[rows] = self.num_planned
        following = next_drafts(rows, columns, self._limits)
        token_ids = self._token_ids(decodes, chunks)
        columns.ready_drafts[rows] = following if self._limits.num_stages == 1 else 0
        return PlannedStep(
            decodes,
            batch.req_ids(rows),
            rows,
            columns.admission[rows],
            counts,
            columns.planned_len[rows],
            slots,
            group_slots,
            self._pool.groups.snapshots,
            prefills + _recomputed_outputs(chunks),
            token_ids,
            following,
            self._ready_lens(decodes),
            num_background=int(counts[columns.is_background[rows] > 0].sum()) if batch.num_background else 0,
        )

    def _token_ids(self, decodes: Decodes, chunks: list[Chunk]) -> Int32Array:
        """Of the tokens that a step computes. Only the last stage of a pipeline samples tokens, so the first gets them.

        The tokens are known: see ``_without_in_flight``. That of a decode is the last one of its request, and drafts
        follow it that the last stage has proposed.
        """
        if self._limits.num_stages == 1:
            return NO_INT32
        rows, columns = decodes.rows, self._batch.columns
        last, is_known = columns.outputs.last(rows)
        last[~is_known] = [req.last_token_id for req in self._batch.at(rows[~is_known])]
        if len(decodes.draft_counts):
            with_drafts = np.concatenate((last[:, None], columns.draft_ids[rows]), axis=1)
            last = with_drafts[np.arange(with_drafts.shape[1]) <= decodes.draft_counts[:, None]]
        parts = [req.tokens_between(req.planned_len - count, req.planned_len) for req, count in chunks]
        return np.concatenate((last, *parts))

    def _ready_lens(self, decodes: Decodes) -> Int32Array:
        """Of decodes that are planned: only the last stage has counted the accepted drafts of the steps before."""
        if self._limits.num_stages == 1 or not self._limits.num_drafts:
            return NO_INT32
        return (self._batch.columns.planned_len[decodes.rows] - 1).astype(np.int32)

    def _cache_prompt(self, req: Req, count: int) -> PrefillChunk:
        """``count`` more tokens of its prompt are planned."""
        self._pool.cache_prompt(req)
        return req.timeline, count

    def _chunks(self, now_s: float) -> tuple[Decodes, list[Chunk]]:
        """The requests of which the next step computes the next token, and the chunks of prompts."""
        isolated = self._batch.isolation.isolated
        rows = np.array([isolated.row], dtype=np.int64) if isolated else self._batch.rows
        rows = self._without_background(self._without_in_flight(rows))
        unplanned = self._batch.columns.unplanned(rows)
        decoding = self._share_of_step(rows[unplanned == 1])
        prompts = self._beyond_drafts(rows[unplanned > 1])
        decoding, most = self._limit_background(decoding, prompts, now_s)
        if self._pool.loading_tokens:  # loads hold slots that no preemption frees
            missing = self._batch.columns.missing_slots(decoding, np.zeros_like(decoding))
            decoding = decoding[np.cumsum(missing) <= self._pool.available]
        decodes = plan_drafts(decoding, self._batch.columns, self._limits, self._pool.available)
        if not prompts or most == 0:
            return decodes, []
        available = self._pool.available - decodes.num_slots
        return decodes, self._chunking.divide(prompts, decodes, len(self._queue), available, most)

    def _without_background(self, rows: Int64Array) -> Int64Array:
        """While the prompt of a client's request is computed, requests that nobody waits for are left out."""
        if not self._batch.num_background:
            return rows
        columns, of_clients = self._batch.columns, self._batch.rows_of_clients(rows)
        # of a cached prompt, only the last token is computed
        prefills = (columns.unplanned(of_clients) > 1) | (
            columns.planned_len[of_clients] < columns.prompt_len[of_clients]
        )
        return of_clients if prefills.any() else rows

    def _limit_background(
        self, decoding: Int64Array, prompts: list[Req], now_s: float
    ) -> tuple[Int64Array, int | None]:
        """The requests that decode, without background requests beyond the limit, and the most prompt tokens.

        Prompts are either all of clients or all of background requests. Those that have waited longest decode first.
        """
        limit = self.background.tokens(now_s) if self._batch.num_background else None
        if limit is None:
            return decoding, None
        is_background = self._batch.columns.is_background[decoding] > 0
        background = self._longest_waiting(decoding[is_background], limit)
        if len(background) < is_background.sum():
            decoding = decoding[~is_background | np.isin(decoding, background)]
        return decoding, limit - len(background) if prompts and prompts[0].is_background else None

    def _beyond_drafts(self, rows: Int64Array) -> list[Req]:
        """Of these requests, which compute several known tokens next, those without drafts in flight.

        A grammar has forced tokens where there were drafts. The slots of rejected drafts are free again: a chunk gets
        new ones for all its tokens.
        """
        columns = self._batch.columns
        reqs = self._batch.at(rows[columns.planned_drafts[rows] == 0])
        for req in reqs:
            if req.spare_slots:
                self._pool.take_back(req)
        return reqs

    def _without_in_flight(self, rows: Int64Array) -> Int64Array:
        """The first stage of a pipeline needs the token of a request's last step, which the last stage samples.

        So steps in flight have different requests. Chunks of one prompt may be in flight together.
        """
        return rows if self._limits.num_stages == 1 else rows[self._batch.columns.in_flight(rows) == 0]

    def _share_of_step(self, decodes: Int64Array) -> Int64Array:
        """Of these requests, those that the next step computes: every stage of a pipeline should have its share.

        Those that have waited longest go first.
        """
        share = -(-len(self._batch) // self._limits.num_stages)
        return self._longest_waiting(decodes, share)

    def _longest_waiting(self, decodes: Int64Array, count: int) -> Int64Array:
        """Of these requests, those whose last steps were first, in the same order."""
        if len(decodes) <= count:
            return decodes
        oldest = np.argsort(self._batch.columns.planned_step[decodes], kind="stable")[:count]
        return decodes[np.sort(oldest)]


def _recomputed_outputs(chunks: list[Chunk]) -> list[PrefillChunk]:
    """Of preempted requests: chunks of output tokens whose KV is computed again. Such chunks come after all decodes."""
    longer = takewhile(lambda chunk: chunk[1] > 1, reversed(chunks))
    return [(req.timeline, count) for req, count in longer if req.planned_len - count >= len(req.prompt_ids)]
