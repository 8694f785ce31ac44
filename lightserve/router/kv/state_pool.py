"""The states of recurrent layers: one row for each running request, and rows that cached prefixes keep.

A step reads the state of a request from one row and writes it to another one or the same. At the end of a chunk the row
may stay with the prefix that ends there: then the next step writes to a new row. A chunk may write one more row, of the
state inside of it: a snapshot. So nothing is copied, and a cached prefix can be continued only where a state was kept.
That is

- before the last token of a prompt, so that the same prompt finds it, and choices and forks begin there. In a chat it
  is before the tokens that begin the answer: the next turn may begin it in another way, without its reasoning;
- where the prefix of a request ended without a state: others that share this much are likely to come;
- every ``INTERVAL`` tokens of a long prompt;
- where a request ends or is preempted.

The last of these places in a prompt has a snapshot, unless its chunk ends there or no row is left for it. At each of
the others a chunk ends. Kept rows that no request reads are evicted when rows are short, the least recently used first,
so they never stop a request from running.

With --deterministic, a state is kept only where whole blocks of a prompt end, which are chunks: it then has the bits of
one that is computed again, in whatever steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightserve.messages.control import StateKv
from lightserve.messages.int_arrays import NO_INT32, Int32Array, Int64Array, int32s
from lightserve.router.chunk_boundaries import in_blocks
from lightserve.router.kv.group_pool import KvGroupPool, RunningReqs
from lightserve.router.kv.group_slots import NONE
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.stored_group import Bools
from lightserve.router.req import Req

# Each place where a state is kept takes a row, and costs a request one more step if it has no snapshot. A prefix of
# fewer tokens is computed in about the same time as that step.
MIN_TOKENS = 32
INTERVAL = 8_192  # tokens; a state takes the memory of the KV of some thousand tokens


@dataclass(slots=True)
class ReqState:
    row: int = NONE  # its state after the planned tokens
    is_kept: bool = False  # a cached prefix has the row too: the next step must not write to it
    batch_row: int = NONE  # of the running requests
    ends: set[int] = field(default_factory=set)  # lengths at which its state is kept
    snapshot_len: int = 0  # the last of them, if no chunk has to end there; 0: there is none
    snapshot_row: int = NONE  # that the step which is being planned writes

    @property
    def needs_row(self) -> bool:
        """Whether its next step needs a new row."""
        return self.row == NONE or self.is_kept


class StatePool(KvGroupPool):
    """The row of a cached prefix belongs to the last of its tokens."""

    name = "state"

    def __init__(self, figures: StateKv, num_tokens: int) -> None:
        """``num_tokens``: slots of the pool of all tokens."""
        self._multiple = figures.block  # of the lengths of prompts at which states are kept
        if figures.size < 2:
            raise ValueError(f"{figures.size} rows of states: a request may read one and write another")
        self.figures = figures
        super().__init__(figures.size, num_tokens)

    def _clear(self) -> None:
        self._reqs: dict[Req, ReqState] = {}
        self._num_needed = 0  # requests whose next steps need new rows
        # rows that the step which is being planned reads for the last time, or writes for a cached prefix alone
        self._left = list[int]()

    def bind(self, running: RunningReqs) -> None:
        self._running = running
        rows = len(running.columns.planned_len)
        self._row: Slots = np.full(rows, NONE, dtype=np.int32)  # ReqState.row of running requests
        self._needs_row = np.zeros(rows, dtype=np.bool_)

    def fits(self, req: Req, step_tokens: int) -> bool:
        short = self._num_needed + (req not in self._reqs) - self.slots.available
        return short <= 0 or self._stop_keeping(short)

    def _stop_keeping(self, count: int) -> bool:
        """Let running requests write to rows that only they read, instead of keeping them for others."""
        freed = [state for state in self._reqs.values() if state.is_kept and self.slots.num_holders(state.row) == 1]
        if len(freed) < count:
            return False
        for state in freed[:count]:
            self.slots.forget(int32s([state.row]))
            self._set(state, state.row, is_kept=False)
        return True

    def usable_len(self, tokens: Slots) -> int:
        places = np.flatnonzero(self.slots.has_slot(tokens))
        return int(places[-1]) + 1 if len(places) else 0

    def attach(self, req: Req, tokens: Slots, matched_len: int) -> None:
        self._reqs[req] = state = ReqState()
        self._num_needed += 1
        if len(tokens):
            self._set(state, self.slots.hold(tokens[-1:]).item(), is_kept=True)
        if self.figures.block > 1:
            req.boundaries = in_blocks(len(req.prompt_ids), req.total_len, self.figures.block)
        begin, last = len(tokens), len(req.prompt_ids) - 1
        before_answer = len(req.prompt_ids) - max(req.generation_prompt_len, 1)
        ends = [end for end in range(INTERVAL, last, INTERVAL) if end > begin]
        places = min(max(matched_len, req.branch_len), last), before_answer
        ends += [end for end in map(self._rounded, places) if end - begin >= MIN_TOKENS]
        if ends and self._multiple == 1 and req.boundaries.may_end_at(max(ends)):
            state.snapshot_len = max(ends)
            state.ends.add(state.snapshot_len)
            ends = [end for end in ends if end < state.snapshot_len]
        self._end_chunks_at(req, state, ends)

    def _rounded(self, length: int) -> int:
        return length // self._multiple * self._multiple

    def keep_at(self, req: Req, length: int) -> int | None:
        state, length = self._reqs.get(req), self._rounded(length)
        if state is not None and req.planned_len < length < len(req.prompt_ids) and length != state.snapshot_len:
            self._end_chunks_at(req, state, [length])
        return length

    def _end_chunks_at(self, req: Req, state: ReqState, ends: Sequence[int]) -> None:
        if ends:
            req.boundaries = req.boundaries.with_ends(ends)
            state.ends.update(ends)

    def enter(self, req: Req) -> None:
        if req not in self._reqs:
            self._reqs[req] = ReqState()
            self._num_needed += 1
        state = self._reqs[req]
        state.batch_row = req.row
        self._set(state, state.row, state.is_kept)

    def held_slots(self, req: Req) -> Slots:
        """The row that its next step reads; empty: it begins with no state."""
        row = self._reqs[req].row
        return NO_INT32 if row == NONE else int32s([row])

    def alloc(self, rows: Int64Array, counts: Int32Array, chunks: Sequence[tuple[Req, int]]) -> Slots:
        """The row that each request writes, then those of snapshots. A request reads the one that it wrote last."""
        rows = np.append(rows, np.array([req.row for req, _ in chunks], dtype=np.int64))
        for req in self._running.at(rows[self._needs_row[rows]]):
            state = self._reqs[req]
            self._left += [] if state.row == NONE else [state.row]
            self._set(state, self.slots.alloc(1).item(), is_kept=False)
        return np.append(self._row[rows], self._alloc_snapshots(chunks, len(rows) - len(chunks)))

    def _alloc_snapshots(self, chunks: Sequence[tuple[Req, int]], first: int) -> Slots:
        """Rows for the snapshots of chunks, whose first one has this number in the step."""
        planned = []
        for number, (req, count) in enumerate(chunks, start=first):
            state = self._reqs[req]
            before = state.snapshot_len - req.planned_len
            if 0 < before < count and self._num_needed < self.slots.available:
                state.snapshot_row = self.slots.alloc(1).item()
                self._left.append(state.snapshot_row)
                planned.append((number, before, state.snapshot_row))
        self.snapshots = int32s([value for number, before, _ in planned for value in (number, before)])
        return int32s([row for _, _, row in planned])

    def end_step(self, rows: Int64Array, chunks: Sequence[tuple[Req, int]]) -> None:
        self.slots.free(int32s(self._left))
        self._left.clear()
        for req, _ in chunks if len(self.snapshots) else ():
            self._reqs[req].snapshot_row = NONE  # its prompt may not have been cached

    def release(self, req: Req) -> None:
        state = self._reqs.pop(req, None)
        if state is None:
            return
        self._num_needed -= state.needs_row
        if state.row != NONE:
            self.slots.free(int32s([state.row]))

    def add_cached(self, req: Req, tokens: Slots, begin: int, is_leaving: bool = False) -> None:
        """Keep its state, if all its tokens are cached, and a row is left for its next step.

        With drafts in flight, only the workers know which tokens the state has seen.
        """
        state = self._reqs[req]
        if state.snapshot_row != NONE and len(tokens) >= state.snapshot_len:
            self.slots.add_cached(tokens[state.snapshot_len - 1 : state.snapshot_len], int32s([state.snapshot_row]))
            state.snapshot_row = NONE
        is_exact = len(tokens) == req.planned_len and not req.has_drafted
        if not is_exact or not len(tokens) or state.needs_row:
            return
        if is_leaving:
            is_block_end = len(tokens) % self.figures.block == 0 and len(tokens) <= len(req.prompt_ids)
            is_wanted = is_block_end or self.figures.block == 1
        else:
            is_wanted = len(tokens) in state.ends and self._num_needed < self.slots.available
        if is_wanted and self.slots.add_cached(tokens[-1:], int32s([state.row])):
            self._set(state, state.row, is_kept=True)

    def _continuing(self, tokens: Slots) -> Slots:
        return tokens[-1:]

    def align(self, tokens: int) -> None:
        self._multiple = math.lcm(self.figures.block, tokens)

    @property
    def blocks_before(self) -> int:
        return 1

    def has_blocks(self, tokens: Slots) -> Bools:
        """The state after a block is that of its last token."""
        return self.slots.has_slot(tokens[:, -1])

    def block_slots(self, tokens: Slots) -> Slots:
        return self.slots.slots_of(tokens[-1:])

    def can_load(self, num_blocks: int, step_tokens: int) -> bool:
        return self._num_needed + num_blocks <= self.slots.available

    def start_load(self, num_blocks: int) -> Slots:
        return self.slots.alloc(num_blocks)

    def _add_loaded(self, tokens: Slots, slots: Slots, was_sent: bool) -> None:
        self.slots.add_cached(tokens[:, -1], slots)

    def sent_slots(self, req: Req, end: int) -> Slots:
        """The row that the step writes which computes the last of these tokens."""
        return int32s([self._reqs[req].row])

    def _set(self, state: ReqState, row: int, is_kept: bool) -> None:
        self._num_needed -= state.needs_row
        state.row, state.is_kept = row, is_kept
        self._num_needed += state.needs_row
        if state.batch_row != NONE:
            self._row[state.batch_row], self._needs_row[state.batch_row] = row, state.needs_row
