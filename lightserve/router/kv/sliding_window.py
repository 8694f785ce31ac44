"""The KV of the layers that attend to a sliding window only.

A token has a slot here as well as in the pool of all tokens, but loses it earlier. A request holds the slots of its
last ``kept_tokens``. So a prefix cannot be continued everywhere: only where the tokens that the next token's window
reaches still have their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import SlidingWindowKv
from lightserve.messages.int_arrays import NO_INT32, GrowingArray, Heads, Int32Array, Int64Array, Tails
from lightserve.router.kv.group_pool import KvGroupPool, RunningReqs
from lightserve.router.kv.group_slots import NONE
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.stored_group import Bools
from lightserve.router.req import Req


@dataclass(slots=True)
class ReqSlots:
    """The slots of a request's first tokens, without those in the tail of its row."""

    slots: GrowingArray = field(default_factory=GrowingArray)
    begin: int = 0  # it holds its slots from here on, before it runs
    row: int = NONE  # of the running requests


class SlidingWindowPool(KvGroupPool):
    def __init__(self, figures: SlidingWindowKv, num_tokens: int) -> None:
        """``num_tokens``: slots of the pool of all tokens."""
        self.name = f"sliding_window_{figures.window}"
        self.figures = figures
        self.kept_tokens = figures.kept_tokens  # a request holds the slots of so many last tokens
        self._needed = max(figures.window - 1, 1)  # tokens before a token that its window reaches
        super().__init__(figures.size, num_tokens)

    def _clear(self) -> None:
        self._reqs: dict[Req, ReqSlots] = {}
        self._num_loading = 0  # slots that loads hold

    def bind(self, running: RunningReqs) -> None:
        self._running = running
        rows = len(running.columns.planned_len)
        self._begin: Int64Array = np.zeros(rows, dtype=np.int64)  # a running request holds its slots from here on
        self._tails = Tails(rows)  # the last slots
        self._leaving = Heads(rows)  # slots from ``_begin`` on

    @property
    def available(self) -> int:
        return self.slots.available

    @property
    def max_chunk(self) -> int:
        return self.size - self.kept_tokens

    def fits(self, req: Req, step_tokens: int) -> bool:
        """Whether there are the slots that all requests may hold, and those of a step's new tokens."""
        return self._has_room(min(len(req.prompt_ids) + req.max_new_tokens, self.kept_tokens + 1), step_tokens)

    def _has_room(self, slots: int, step_tokens: int) -> bool:
        """Whether so many slots can be held beside those of running requests and loads."""
        columns, rows = self._running.columns, self._running.rows
        lengths = columns.prompt_len[rows] + columns.max_new_tokens[rows]
        held = int(np.minimum(lengths, self.kept_tokens + 1).sum()) + self._num_loading + len(self._pinned)
        return held + slots + min(step_tokens, self.size // 2) <= self.size

    def usable_len(self, tokens: Slots) -> int:
        lost = np.flatnonzero(~self.slots.has_slot(tokens))
        begins = np.concatenate(([0], lost + 1))  # of the runs of tokens that have slots
        ends = np.append(lost, len(tokens))
        long_enough = np.flatnonzero(ends - begins >= self._needed)
        return int(ends[long_enough[-1]] if len(long_enough) else ends[0])

    def attach(self, req: Req, tokens: Slots, matched_len: int) -> None:
        begin = max(len(tokens) - self._needed, 0)
        lost = np.full(begin, NONE, dtype=np.int32)
        self._reqs[req] = ReqSlots(GrowingArray(np.concatenate((lost, self.slots.hold(tokens[begin:])))), begin)

    def enter(self, req: Req) -> None:
        held = self._reqs.setdefault(req, ReqSlots())
        held.row = req.row
        self._begin[req.row] = held.begin
        self._tails.take(req.row)  # of a request that left
        self._leaving.clear(req.row)

    def held_slots(self, req: Req) -> Slots:
        """Those of its last tokens."""
        return self._flush(req).view[self._begin.item(req.row) :]

    def alloc(self, rows: Int64Array, counts: Int32Array, chunks: Sequence[tuple[Req, int]]) -> Slots:
        """Slots for all tokens of the step that have none."""
        begin = int(counts.sum()) if len(counts) else len(rows)
        slots = self.slots.alloc(begin + sum(count for _, count in chunks))
        self._append(rows, slots[:begin], counts)
        for req, count in chunks:
            self._flush(req).extend(slots[begin : begin + count])
            begin += count
        return slots

    def end_step(self, rows: Int64Array, chunks: Sequence[tuple[Req, int]]) -> None:
        """Requests free the slots that their next tokens do not reach."""
        released = [self._leave(req, req.planned_len - self.kept_tokens) for req, _ in chunks]
        self.slots.free(np.concatenate((self._leave_decodes(rows), *released)))

    def take_back(self, req: Req) -> None:
        held, slots = self._reqs[req], self._flush(req).view
        held.slots = GrowingArray(slots[: req.planned_len])
        self.slots.free(slots[req.planned_len :])

    def release(self, req: Req) -> None:
        held = self._reqs.get(req)
        if held is None:
            return
        slots = held.slots.view[held.begin :] if held.row == NONE else self.held_slots(req)
        del self._reqs[req]
        self.slots.free(slots)

    def add_cached(self, req: Req, tokens: Slots, begin: int, is_leaving: bool = False) -> None:
        begin = max(begin, self._begin.item(req.row))
        self.slots.add_cached(tokens[begin:], self._flush(req).view[begin : len(tokens)])

    def _continuing(self, tokens: Slots) -> Slots:
        return tokens[max(len(tokens) - self._needed, 0) :]

    @property
    def blocks_before(self) -> int:
        return -(-self._needed // BLOCK_TOKENS)

    def has_blocks(self, tokens: Slots) -> Bools:
        has_all: Bools = np.all(self.slots.has_slot(tokens), axis=1)
        return has_all

    def block_slots(self, tokens: Slots) -> Slots:
        return self.slots.slots_of(tokens)

    def can_load(self, num_blocks: int, step_tokens: int) -> bool:
        count = num_blocks * BLOCK_TOKENS
        return count <= self.slots.available and self._has_room(count, step_tokens)

    def start_load(self, num_blocks: int) -> Slots:
        self._num_loading += num_blocks * BLOCK_TOKENS
        return self.slots.alloc(num_blocks * BLOCK_TOKENS)

    def finish_load(self, tokens: Slots, slots: Slots, was_sent: bool = False) -> None:
        self._num_loading -= len(slots)
        super().finish_load(tokens, slots, was_sent)

    def _add_loaded(self, tokens: Slots, slots: Slots, was_sent: bool) -> None:
        begin = max(len(slots) - self._needed, 0) if was_sent else 0
        self.slots.add_cached(tokens.flatten()[begin:], slots[begin:])

    def sent_slots(self, req: Req, end: int) -> Slots:
        begin = max(end - self.blocks_before * BLOCK_TOKENS, 0)
        return np.maximum(self._flush(req).view[begin:end], 0)  # it may not hold the first ones

    def _flush(self, req: Req) -> GrowingArray:
        """All slots of a running request."""
        held = self._reqs[req]
        held.slots.extend(self._tails.take(held.row))
        return held.slots

    def _append(self, rows: Int64Array, slots: Slots, counts: Int32Array) -> None:
        """``counts`` slots to each of these requests, perhaps none; empty: one each."""
        if len(counts):
            rows, counts = rows[counts > 0], counts[counts > 0]
        full = self._tails.full(rows, counts if len(counts) else 1)
        for req in self._running.at(np.array(full, dtype=np.int64)):
            self._flush(req)
        self._tails.append(rows, slots, counts)

    def _leave(self, req: Req, end: int) -> Slots:
        """The slots before ``end``, which a request does not hold from now on."""
        begin = self._begin.item(req.row)
        self._begin[req.row] = end = max(begin, end)
        self._leaving.clear(req.row)
        return self._flush(req).view[begin:end]

    def _leave_decodes(self, rows: Int64Array) -> Slots:
        """The same of decodes, whose next tokens do not reach these slots."""
        planned_len, released = self._running.columns.planned_len, [NO_INT32]
        while len(rows := rows[planned_len[rows] - self.kept_tokens > self._begin[rows]]):  # rarely twice
            for req in self._running.at(self._leaving.empty(rows)):
                self._leaving.fill(req.row, self.held_slots(req))
            self._begin[rows] += 1
            released.append(self._leaving.take(rows))
        return np.concatenate(released)
