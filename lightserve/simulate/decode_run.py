"""Several steps in a row in which every running request decodes and nothing else happens.

The simulator plans most of its steps like this. A step costs it one allocation of slots. The requests and the batch
learn of all steps at once, when something else happens. Then everything is as if each step had been planned and
processed by itself.
"""

from __future__ import annotations

import numpy as np

from lightserve.messages.int_arrays import BLOCK, Int32Array, Int64Array, Tails
from lightserve.router.scheduler import GroupScheduler, Scheduler
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.planner import PlannedStep

OneStep = tuple[Int32Array, Int64Array]  # the slots of the step, and the tokens of each request after it


class DecodeRun:
    def __init__(self, batch: RunningBatch, may_evict: bool) -> None:
        columns = batch.columns
        self.rows = batch.rows
        self.req_ids = batch.req_ids(self.rows)
        left = columns.max_new_tokens[self.rows] - 1 - columns.planned_outputs[self.rows]
        self.max_steps = int(left.min())  # so many cannot end a request by its length
        self._batch = batch
        self._may_evict = may_evict
        self._slots: list[Int32Array] = []  # of each step

    def __len__(self) -> int:
        """Steps that are planned."""
        return len(self._slots)

    def plan(self) -> bool:
        """Plan one more step. False: there is no memory. Requests must be preempted, or cached tokens evicted."""
        pool, count = self._batch.pool, len(self.rows)
        if (pool.available if self._may_evict else pool.slots.num_free) < count:
            return False
        self._slots.append(pool.alloc(count))
        return True

    @property
    def num_fitting(self) -> int:
        """So many more steps find free slots, without evicting cached tokens."""
        return self._batch.pool.slots.num_free // len(self.rows)

    def plan_many(self, steps: int) -> None:
        """``plan`` so many of those steps. Their slots are those that steps planned one by one get."""
        count = len(self.rows)
        self._slots.extend(self._batch.pool.alloc(count * steps).reshape(steps, count))

    def apply(self, token_ids: list[int], last_token_s: float) -> list[OneStep]:
        """Give the requests what was planned. All of them have got ``token_ids``, the last at ``last_token_s``.

        Returns the steps that are in flight.
        """
        columns, rows = self._batch.columns, self.rows
        begin = columns.planned_len[rows]
        self._extend(columns.slots, np.array(self._slots, dtype=np.int32).T)
        self._extend(columns.outputs, np.tile(np.array(token_ids, dtype=np.int32), (len(rows), 1)))
        columns.planned_len[rows] += len(self)
        columns.planned_outputs[rows] += len(self)
        columns.output_len[rows] += len(token_ids)
        if token_ids:
            columns.certain_len[rows] = begin + len(token_ids)
            columns.last_token_s[rows] = last_token_s
        in_flight = enumerate(self._slots[len(token_ids) :], len(token_ids) + 1)
        return [(slots, begin + number) for number, slots in in_flight]

    def _extend(self, tails: Tails, values: Int32Array) -> None:
        """``values``: a row for each request."""
        for begin in range(0, values.shape[1], BLOCK):
            block = values[:, begin : begin + BLOCK]
            for req in self._batch.at(np.array(tails.full(self.rows, block.shape[1]), dtype=np.int64)):
                req.flush()
            tails.extend(self.rows, block)


class DecodeRunScheduler(Scheduler):
    """A scheduler that can plan many steps at once."""

    def begin_decodes(self) -> DecodeRun | None:
        """The next steps, if nothing but decoding happens in them. Then ``next_step`` must not be called before
        ``end_decodes``. The workers free requests with a later step. None: it may be otherwise, or is not simple."""
        group, limits = self.only_group, self.limits
        is_simple = limits.num_stages == 1 and not group.pool.groups and not _may_transfer(group)
        is_simple = is_simple and not limits.num_drafts
        is_simple = is_simple and not any(step.completed.blocked for step in self._steps_of(group))
        is_full = len(group.batch) >= limits.max_running
        may_start = (len(group.queue) and not is_full) or group.admission.may_prefetch
        if not is_simple or group.isolation.is_active or may_start or not _all_decode(group):
            return None
        for step_part in group.parts:
            step_part.begin_step()  # what was computed before may be stored once the run has ended
        return DecodeRun(group.batch, may_evict=not any(source.stores_evicted for source in group.sources))

    def end_decodes(self, run: DecodeRun, token_ids: list[int], last_token_s: float) -> None:
        """Go on with ``next_step``. The first steps of the run have ended with these tokens, the last of them at
        ``last_token_s``; the others are in flight."""
        group, rows = self.only_group, run.rows
        columns = group.batch.columns
        group.planner.num_planned += len(run)
        columns.planned_step[rows] = group.planner.num_planned
        admissions, counts = columns.admission[rows], np.ones(len(rows), dtype=np.int64)
        for slots, planned_len in run.apply(token_ids, last_token_s):
            step = PlannedStep(Decodes(rows), run.req_ids, rows, admissions, counts, planned_len, slots)
            self._in_flight.append({group: step})


def _may_transfer(group: GroupScheduler) -> bool:
    """Whether steps may have more to do than to compute."""
    return len(group.sends) > 0 or any(source.has_transfers for source in group.sources)


def _all_decode(group: GroupScheduler) -> bool:
    """Whether the last planned step returns a token of every running request."""
    columns, rows = group.batch.columns, group.batch.rows
    if not len(rows) or bool((columns.planned_step[rows] != group.planner.num_planned).any()):
        return False
    prompt_len, planned_len = columns.prompt_len[rows], columns.planned_len[rows]
    decodes = (columns.unplanned(rows) == 1) & (planned_len >= prompt_len) & (columns.is_plain[rows] > 0)
    return bool(decodes.all())
