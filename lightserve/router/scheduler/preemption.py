"""Which running requests make room when the KV pool runs out of memory."""

from __future__ import annotations

import numpy as np

from lightserve.router.policy import Policy
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue
from lightserve.router.scheduler.batch import RunningBatch


class Preemption:
    """Moves requests back into the queue. Their KV stays in the prefix cache while there is room."""

    def __init__(self, batch: RunningBatch, queue: ReqQueue, policy: Policy) -> None:
        self.count = 0
        self._batch = batch
        self._queue = queue
        self._policy = policy

    def make_room(self) -> None:
        """Preempt until every decoding request can have its next token. A single request always can."""
        available = self._batch.pool.available
        while len(self._batch) > max(1, available):  # decodes are counted only if memory is short
            if self._missing_slots() <= available:
                return
            self.preempt_newest()
            available = self._batch.pool.available

    def _missing_slots(self) -> int:
        """Of the next tokens of all decoding requests. Those that have slots of rejected drafts use these."""
        decoding = self._batch.rows[self._batch.unplanned() == 1]
        return int(self._batch.columns.missing_slots(decoding, np.zeros_like(decoding)).sum())

    def is_stuck(self) -> bool:
        """Whether no request has memory to continue, and no request in flight can end and free some."""
        batch = self._batch
        return len(batch) > 1 and bool(batch.unplanned().any()) and not batch.has_in_flight()

    def preempt_newest(self) -> None:
        """Preempt the request with the lowest priority; of these the latest arrival."""
        self.preempt(max(self._batch, key=self._need))

    def _need(self, req: Req) -> tuple[bool, int, float, int]:
        """The highest leaves first."""
        return req.is_background, self._policy.priority(req), req.arrived_s, req.req_id

    def preempt_background(self) -> bool:
        """Preempt the latest background request. False: none runs."""
        background = [req for req in self._batch if req.is_background]
        if background:
            self.preempt(max(background, key=lambda req: (req.arrived_s, req.req_id)))
        return bool(background)

    def preempt(self, req: Req) -> None:
        """The request is admitted again before all requests of its kind that have not begun."""
        self._batch.release(req)
        self._queue.add_preempted(req)
        self.count += 1
        req.timeline.paused("preempted", req.output_len)
