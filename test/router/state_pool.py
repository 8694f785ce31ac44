"""A KV group of layers with recurrent state: one row for each request, and rows that cached prefixes keep.

A step reads the state of a request from one row and writes it to another one or the same. At the end of a chunk of a
prompt the row may stay with the prefix that ends there: then the next step writes to a new row. So nothing is copied,
and a prefix can be continued only where a state was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array, int32s
from lightserve.router.kv.group_pool import KvGroupPool, RunningReqs
from lightserve.router.kv.group_slots import NONE, GroupSlots
from lightserve.router.kv.slots import Slots
from lightserve.router.req import Req


@dataclass(slots=True)
class ReqState:
    row: int = NONE  # its state after the planned tokens
    is_kept: bool = False  # a cached prefix has the row too: the next step must not write to it

    @property
    def needs_row(self) -> bool:
        """Whether its next step needs a new row."""
        return self.row == NONE or self.is_kept


class StatePool(KvGroupPool):
    """The row of a cached prefix belongs to the last of its tokens."""

    name = "state"

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        if num_rows < 2:
            raise ValueError(f"{num_rows} rows: a request may read one and write another")
        self._figures = num_rows, num_tokens
        self.reset()

    def reset(self) -> None:
        self.slots = GroupSlots(*self._figures)
        self._reqs: dict[Req, ReqState] = {}
        self._left = list[int]()  # rows that the step which is being planned reads for the last time

    def bind(self, running: RunningReqs) -> None:
        self._running = running

    @property
    def size(self) -> int:
        return self.slots.size

    @property
    def used(self) -> int:
        return self.slots.used

    @property
    def _num_needed(self) -> int:
        return sum(state.needs_row for state in self._reqs.values())

    def fits(self, req: Req, step_tokens: int) -> bool:
        return self._num_needed + (req not in self._reqs) <= self.slots.available

    def usable_len(self, tokens: Slots) -> int:
        kept = np.flatnonzero(self.slots.has_slot(tokens))
        return int(kept[-1]) + 1 if len(kept) else 0

    def attach(self, req: Req, tokens: Slots) -> None:
        self._reqs[req] = state = ReqState()
        if len(tokens):
            state.row, state.is_kept = self.slots.hold(tokens[-1:]).item(), True

    def enter(self, req: Req) -> None:
        self._reqs.setdefault(req, ReqState())

    def held_slots(self, req: Req) -> Slots:
        """The row that its next step reads; empty: it begins with no state."""
        row = self._reqs[req].row
        return NO_INT32 if row == NONE else int32s([row])

    def alloc(self, rows: Int64Array, counts: Int32Array, chunks: Sequence[tuple[Req, int]]) -> Slots:
        """The row that each request writes. It reads the one that it wrote last."""
        reqs = [*self._running.at(rows), *(req for req, _ in chunks)]
        for state in map(self._reqs.__getitem__, reqs):
            if state.needs_row:
                self._left += [] if state.row == NONE else [state.row]
                state.row, state.is_kept = self.slots.alloc(1).item(), False
        return int32s([self._reqs[req].row for req in reqs])

    def end_step(self, rows: Int64Array, chunks: Sequence[tuple[Req, int]]) -> None:
        self.slots.free(int32s(self._left))
        self._left.clear()

    def release(self, req: Req) -> None:
        state = self._reqs.pop(req, None)
        if state is not None and state.row != NONE:
            self.slots.free(int32s([state.row]))

    def add_cached(self, req: Req, tokens: Slots, begin: int) -> None:
        """Keep its state if all its tokens are cached, and a row is left for its next step.

        With drafts in flight, only the workers know which tokens the state has seen.
        """
        state = self._reqs[req]
        is_exact = len(tokens) == req.planned_len and not req.has_drafted
        if not is_exact or state.needs_row or self._num_needed >= self.slots.available:
            return
        self.slots.add_cached(tokens[-1:], int32s([state.row]))
        state.is_kept = True

    def remove_cached(self, tokens: Slots) -> None:
        self.slots.remove_cached(tokens)

    def invalidate(self, slots: Slots) -> None:
        self.slots.invalidate(slots)
