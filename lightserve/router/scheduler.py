"""Who runs next: first come, first served, no request paused. Knows neither torch nor processes.

A request is admitted when the pool can hold its prompt and all the output it may ask for, so nothing ever runs out.
Each step carries one token of every running request and prompt chunks up to a budget. Several steps may be planned
before the tokens of the first are back: workers run them in order, so what one step frees the next may use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from lightserve.common.token_slots import TokenSlots
from lightserve.io_struct import Step, StepRow, TokenOut
from lightserve.router.req import Req


class Scheduler:
    def __init__(self, num_slots: int, max_running: int, batch_max_tokens: int) -> None:
        self.slots = TokenSlots(num_slots)
        self._max_running = max_running
        self._batch_max_tokens = batch_max_tokens
        self._promised = 0  # slots that running requests hold or may still ask for
        self._waiting: deque[Req] = deque()
        self._running: dict[int, Req] = {}
        self._left: list[int] = []  # requests the workers must forget

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def used_tokens(self) -> int:
        return self.slots.num_used

    def add(self, req: Req) -> None:
        self._waiting.append(req)

    def next_step(self, now_s: float = 0.0) -> Step | None:
        """What to compute next; None when there is nothing that the steps under way do not do already."""
        new = [req.as_new() for req in self._admit(now_s)]
        rows = self._rows()
        if not rows and not new and not (self._left and not self._running):
            return None  # freed rows of the table can wait for the next step, unless none will come
        left, self._left = self._left, []
        return Step(rows, new, left)

    def take(self, outs: Iterable[TokenOut]) -> list[tuple[Req, TokenOut]]:
        """Give each request its token and release those that are done; tokens of requests that are gone are dropped."""
        taken = []
        for out in outs:
            req = self._running.get(out.req_id)
            if req is None:  # it ended or was aborted while this step was under way
                continue
            req.take(out)
            taken.append((req, out))
            if req.finish_reason is not None:
                self._release(req)
        return taken

    def abort(self, req_id: int) -> Req | None:
        """Drop a request that waits or runs; None if it is neither."""
        req = self._running.get(req_id)
        if req is not None:
            self._release(req)
            return req
        req = next((one for one in self._waiting if one.req_id == req_id), None)
        if req is not None:
            self._waiting.remove(req)
        return req

    def abort_all(self) -> list[Req]:
        waiting, self._waiting = list(self._waiting), deque()
        running = list(self._running.values())
        for req in running:
            self._release(req)
        return waiting + running

    def _release(self, req: Req) -> None:
        del self._running[req.req_id]
        if req.slots:
            self.slots.free(np.array(req.slots, dtype=np.int32))
        self._promised -= req.peak_len
        self._left.append(req.req_id)

    def _admit(self, now_s: float) -> list[Req]:
        admitted = []
        while self._waiting and len(self._running) < self._max_running:
            if self._promised + self._waiting[0].peak_len > self.slots.size:
                break
            req = self._waiting.popleft()
            req.admitted_s = now_s
            self._promised += req.peak_len
            self._running[req.req_id] = req
            admitted.append(req)
        return admitted

    def _rows(self) -> list[StepRow]:
        planned = list(self._counts())
        slots = self.slots.alloc(sum(count for _, count in planned)).tolist()
        rows = []
        begin = 0
        for req, count in planned:
            own = slots[begin : begin + count]
            begin += count
            req.plan(own)
            rows.append(StepRow(req.req_id, own))
        return rows

    def _counts(self) -> Iterator[tuple[Req, int]]:
        """How many tokens of whom the next step computes."""
        prompt_budget = self._batch_max_tokens
        for req in self._running.values():
            count = req.unplanned
            if count > 1:
                count = min(count, prompt_budget)
                prompt_budget -= count
            if count:
                yield req, count
