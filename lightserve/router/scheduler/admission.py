"""Admits waiting requests, within the limits on running requests, on prompt tokens per step and on KV memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from lightserve.messages.int_arrays import Int64Array, int64s
from lightserve.router.kv.source import KvSource, LoadContext
from lightserve.router.policy import LOOK_AHEAD
from lightserve.router.req import Req
from lightserve.router.req_columns import SPARE_SLOTS
from lightserve.router.req_queue import ReqQueue, Wait
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.chunking import Chunking
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.waits import AdapterWaits, PrefixWaits
from lightserve.router.token_budget import OutputEstimate, Rates, peak_tokens

# Of the room beside running requests. While prefetched KV waits, requests end whose KV is younger in the prefix cache,
# and would be evicted later. Simulated, two prefill and one decode server with 8 seats at 1.2 times what they can do:
# with 0.5 no token is computed again, with 1.0 a quarter of all prompt tokens.
PREFETCH_SHARE = 0.5


class HeadOfLine(NamedTuple):
    """The first request of the queue, which did not fit. To find its cached prefix again would find the same."""

    req: Req
    shared_len: int  # of its prefix
    locked: int  # so many of those tokens no running request uses
    num_changes: tuple[int, int, int]


class AdmissionControl:
    def __init__(
        self,
        queue: ReqQueue,
        batch: RunningBatch,
        chunking: Chunking,
        limits: SchedulerLimits,
        estimate: OutputEstimate,
        sources: Sequence[KvSource],
    ) -> None:
        self._queue = queue
        self._batch = batch
        self._pool = batch.pool
        self._chunking = chunking
        self._limits = limits
        self._estimate = estimate
        self._adapters = AdapterWaits(batch.loras, queue)
        self.prefixes = PrefixWaits(batch)
        self._head: HeadOfLine | None = None
        self.client_lacks_room = False  # the last time, though it need not: background requests run
        self._prefetched_at = 0, 0, 0
        self._sources = sources
        self.further_waits: list[Callable[[Req], Wait | None]] = []  # what a request must have besides KV

    def admit(self, now_s: float) -> list[Req]:
        """Move requests from the queue into the batch. They hold their cached tokens from now on."""
        self.wake(now_s)
        admitted = self._admit(now_s)
        while self._adapters.wake():  # those that came back first wait for something else, and leave their slots
            admitted += self._admit(now_s)
        if self.may_prefetch:
            self._prefetch(now_s)
        return admitted

    def _admit(self, now_s: float) -> list[Req]:
        self.client_lacks_room = False
        if not len(self._queue) or self._batch.isolation.isolated:
            return []  # most steps end here, without ordering the queue
        if self._is_full or self.has_no_room:
            self._note_lack_of_room()
            return []
        rows = self._batch.rows
        if self._queue.num_of_clients:  # their prompts do not wait for those of background requests
            rows = self._batch.rows_of_clients(rows)
        unplanned = self._batch.columns.unplanned(rows)
        prefilling = self._batch.at(rows[unplanned > 1])
        decodes = Decodes(rows[unplanned == 1])  # the drafts are planned after admission
        budget = self._chunking.budget(prefilling, decodes, len(self._queue))
        reserved = self._chunking.reserved(budget)
        budget -= int(np.minimum(unplanned[unplanned > 1], reserved).sum())
        if budget <= 0:
            return []
        return self._admit_candidates(prefilling, budget, reserved, now_s)

    def _note_lack_of_room(self) -> None:
        self.client_lacks_room = bool(self._batch.num_background and self._queue.num_of_clients)

    def wake(self, now_s: float) -> None:
        """Let blocked requests come back to the queue that have nothing to wait for any more."""
        self._queue.end_late_waits(now_s)
        self.prefixes.wake()
        self._adapters.wake()

    @property
    def has_no_room(self) -> bool:
        """Whether the first request of the queue did not fit, and does not now. No prefix is looked up."""
        head = self._head
        if head is None or head.num_changes != self._num_changes:
            return False
        return not self._fits_at_peak(head.req, head.shared_len, self._pool.used, head.locked)

    @property
    def _num_changes(self) -> tuple[int, int, int]:
        """Equal to an earlier one: the same requests run and wait, and no more of a prompt is cached."""
        return self._batch.num_changes, self._queue.num_changes, self._pool.num_cached_chunks

    @property
    def _is_full(self) -> bool:
        return len(self._batch) >= self._limits.max_running

    def _admit_candidates(self, prefilling: list[Req], budget: int, reserved: int, now_s: float) -> list[Req]:
        """In the order of the queue, until a request does not fit: if smaller ones passed it, it would starve."""
        isolation = self._batch.isolation
        context = LoadContext(now_s, self._has_room, step_tokens=self._limits.batch_max_tokens)
        admitted: list[Req] = []
        is_first = True  # no request was passed over that may be admitted at any time
        for req in self._queue.candidates(self._pool.cached_len):
            if budget <= 0 or self._must_stay(req, prefilling):
                break
            if req.in_flight:
                is_first = False
                continue
            wait = self._wait_of(req, prefilling, context)
            if wait is not None:
                self._queue.block(req, wait)
                continue
            runs_alone = isolation.needs_isolation(req)
            if runs_alone and admitted:
                break
            if not self._fits(req):
                if not is_first:
                    self._head = None
                self._note_lack_of_room()
                break
            self._start(req, now_s)
            admitted.append(req)
            budget -= min(req.unplanned, reserved)
            if req.is_prefilling:
                prefilling.append(req)
            if runs_alone:
                isolation.isolated = req
        return admitted

    def _must_stay(self, req: Req, prefilling: list[Req]) -> bool:
        """Whether no request may start now from this one on, whatever memory there is."""
        if self._batch.isolation.isolated:
            return True
        # a client that still waits there has a step in flight: its memory is not for background requests
        if req.is_background and (self._queue.num_of_clients or has_client(prefilling)):
            return True
        if self._is_full:
            self._note_lack_of_room()
        return self._is_full

    @property
    def may_prefetch(self) -> bool:
        """Whether loads may begin for requests that wait for room: something has changed since the last look."""
        if not len(self._queue) or not self._sources:
            return False
        return not self._batch.isolation.is_active and self._prefetched_at != self._prefetch_changes

    @property
    def _prefetch_changes(self) -> tuple[int, int, int]:
        return self._batch.num_changes, self._queue.num_changes, self._pool.loading_tokens

    def _prefetch(self, now_s: float) -> None:
        """Begin to load the KV of requests that wait for room, in their order. Each leaves room for those before it.

        To find out that there is nothing to load may take as long as planning a step, so one such request is enough.
        """
        coming = [req for source in self._sources for req in source.expected_reqs]
        loading = self._pool.loading_tokens
        room = int(PREFETCH_SHARE * (self._room + loading)) - loading - int(self._remaining(coming).sum())
        step_tokens = self._limits.batch_max_tokens
        context = LoadContext(now_s, lambda tokens: tokens <= room, is_prefetch=True, step_tokens=step_tokens)
        prefilling = self._batch.at(self._batch.rows[self._batch.unplanned() > 1])
        reqs = list(islice(self._queue.candidates(self._pool.cached_len), LOOK_AHEAD))
        for req, remaining in zip(reqs, self._remaining(reqs).tolist(), strict=True):
            if len(req.prompt_ids) > room:
                break
            was_checked = req.loads_checked
            wait = None if req.in_flight else self._wait_of(req, prefilling, context)
            if wait is not None:
                self._queue.block(req, wait)
            elif req.loads_checked != was_checked:
                return
            room -= len(req.prompt_ids) + remaining
        self._prefetched_at = self._prefetch_changes

    def _wait_of(self, req: Req, prefilling: list[Req], context: LoadContext) -> Wait | None:
        """What a request must wait for before it can run; None: nothing but room."""
        wait = self._adapters.wait_of(req) or self.prefixes.wait_of(req, prefilling)
        wait = wait or self._wait_for_kv(req, context)
        return wait or next(filter(None, (wait_of(req) for wait_of in self.further_waits)), None)

    def _wait_for_kv(self, req: Req, context: LoadContext) -> Wait | None:
        for source in self._sources:
            wait = source.wait_of(req, context)
            if wait is not None and context.now_s < wait.deadline_s:
                return wait
            if wait is not None:  # others began it, and have stopped waiting for it
                wait.on_late(req)
        return None

    def _has_room(self, tokens: int) -> bool:
        """Whether a load can hold so many slots beside what running requests will need."""
        return tokens <= self._pool.available and (self._fits_at_longest(tokens) or tokens <= self._room)

    @property
    def _room(self) -> int:
        """Slots that neither loads hold nor running requests need at their peak."""
        running = self._batch.columns.values[:, self._batch.rows]
        peak = self._peak_tokens(running, self._pool.used, self._tokens_a_step())
        return min(self._pool.size - peak, self._pool.available)

    def _remaining(self, reqs: Sequence[Req]) -> Int64Array:
        """How many more tokens these requests generate, by the estimate."""
        generated = np.array([req.output_len for req in reqs], dtype=np.int64)
        max_new_tokens = np.array([req.max_new_tokens for req in reqs], dtype=np.int64)
        return self._estimate.remaining(generated, max_new_tokens)

    def _fits(self, req: Req) -> bool:
        """Whether the peak with this request fits the pool. If so, the request holds its cached tokens."""
        if not req.shares_prefix:
            return not len(self._batch) or (self._fits_without_output(req) and self._fits_groups(req))
        pool = self._pool
        used, shared_tokens = pool.used, pool.shared_tokens
        pool.attach_prefix(req)
        if not len(self._batch) and not pool.num_loads:
            return True
        longest = len(req.prompt_ids) + req.max_new_tokens
        fits_all = self._fits_at_longest(longest) or self._fits_at_peak(req, req.shared_len, used)
        if fits_all and self._fits_groups(req):
            return True
        locked = pool.shared_tokens - shared_tokens
        self._head = None if fits_all else HeadOfLine(req, req.shared_len, locked, self._num_changes)
        pool.release(req)
        return False

    def _fits_groups(self, req: Req) -> bool:
        return self._pool.groups.fits(req, self._limits.batch_max_tokens)

    def _fits_without_output(self, req: Req) -> bool:
        """Whether the tokens of all prompts fit. A text that is pooled holds its own tokens, and no output follows."""
        prompt_len = self._batch.columns.prompt_len[self._batch.rows]
        return int(prompt_len.sum()) + len(req.prompt_ids) <= self._pool.size

    def _fits_at_longest(self, tokens: int) -> bool:
        """Whether so many tokens fit beside running requests whose outputs have their longest lengths, all at once.

        No request is looked at: the sum is kept. It has only what running requests and pinned prompts hold.
        """
        if self._pool.loading_tokens:
            return False
        return self._batch.max_tokens + self._pool.pinned_tokens + tokens <= self._pool.size

    def _fits_at_peak(self, req: Req, shared_len: int, used: int, to_lock: int = 0) -> bool:
        """``used``: tokens that requests and loads hold. ``to_lock``: tokens of its prefix that it does not hold."""
        req_numbers = req.columns.values[:, [req.row]]
        numbers = np.concatenate((self._batch.columns.values[:, self._batch.rows], req_numbers), axis=1)
        _, _, shared, *_ = numbers
        shared[-1] = shared_len
        return self._peak_tokens(numbers, used, self._tokens_a_step(req)) + to_lock <= self._pool.size

    def _tokens_a_step(self, *waiting: Req) -> Rates | None:
        """Of running requests and of these; None: one each."""
        if not self._limits.num_drafts:
            return None
        columns = [(self._batch.columns, self._batch.rows), *((req.columns, int64s([req.row])) for req in waiting)]
        return np.concatenate([each.tokens_a_step(rows, self._limits.num_drafts) for each, rows in columns])

    def _peak_tokens(self, numbers: Int64Array, used: int, tokens_a_step: Rates | None) -> int:
        """The most tokens that requests and loads hold at once. ``numbers``: the columns of these requests."""
        prompt_len, max_new_tokens, shared, _, _, generated, *_ = numbers
        is_tight = used >= self._limits.token_ratio * self._pool.size
        left = max_new_tokens - generated
        remaining = left if is_tight else self._estimate.remaining(generated, max_new_tokens)
        held = generated + prompt_len - shared  # once prompts are computed
        if tokens_a_step is not None:  # slots of drafts are beyond the estimated end, but never beyond the longest
            held += np.minimum(numbers[SPARE_SLOTS], left - remaining)
        return self._pool.shared_tokens + self._pool.loading_tokens + peak_tokens(held, remaining, tokens_a_step)

    def _start(self, req: Req, now_s: float) -> None:
        self._queue.admit(req)
        req.begin()
        if not req.output_len:
            req.admitted_s = now_s
            req.cached_len = req.planned_len
        req.timeline.admitted(now_s, req.planned_len)
        self._batch.add(req)


def has_client(reqs: list[Req]) -> bool:
    return any(not req.is_background for req in reqs)
