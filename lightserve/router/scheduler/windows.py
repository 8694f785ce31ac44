"""Slots of the windowed pool for the rows of a step: see windowed_pool.py."""

from __future__ import annotations

import numpy as np

from lightserve.messages.int_arrays import NO_INT32, Int64Array
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.windowed_pool import WindowedPool
from lightserve.router.req import Req
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.chunking import Chunk
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.limits import SchedulerLimits


class NoWindows:
    """There is no windowed pool."""

    def alloc(self, decodes: Decodes, chunks: list[Chunk]) -> Slots:
        """Slots for all tokens of the step that have none."""
        return NO_INT32

    def free_out_of_window(self, decodes: Int64Array, chunks: list[Chunk]) -> None:
        """The step is planned: requests let go of slots that their next tokens do not reach."""

    def fits(self, req: Req) -> bool:
        """Whether the pool has the slots that all requests and this one may hold, and those of a step's new tokens."""
        return True


class Windows(NoWindows):
    def __init__(self, batch: RunningBatch, limits: SchedulerLimits) -> None:
        self._batch = batch
        self._limits = limits

    @property
    def _pool(self) -> WindowedPool:
        """Another one after all KV was lost."""
        pool = self._batch.pool.windowed
        assert isinstance(pool, WindowedPool)
        return pool

    def alloc(self, decodes: Decodes, chunks: list[Chunk]) -> Slots:
        begin = decodes.num_slots
        slots = self._pool.alloc(begin + sum(count for _, count in chunks))
        self._batch.plan_windowed(decodes, slots[:begin])
        for req, count in chunks:
            req.plan_windowed(slots[begin : begin + count])
            begin += count
        return slots

    def free_out_of_window(self, decodes: Int64Array, chunks: list[Chunk]) -> None:
        kept = self._pool.kept
        released = [req.let_go_windowed(req.planned_len - kept) for req, _ in chunks]
        self._pool.let_go(np.concatenate((self._batch.let_go_behind_windows(decodes, kept), *released)))

    def fits(self, req: Req) -> bool:
        columns, rows, pool = self._batch.columns, self._batch.rows, self._pool
        lengths = np.append(
            columns.prompt_len[rows] + columns.max_new_tokens[rows], len(req.prompt_ids) + req.max_new_tokens
        )
        held = int(np.minimum(lengths, pool.kept + 1).sum())
        return held + min(self._limits.batch_max_tokens, pool.size // 2) <= pool.size


def make_windows(batch: RunningBatch, limits: SchedulerLimits) -> NoWindows:
    return Windows(batch, limits) if batch.pool.windowed.size else NoWindows()
