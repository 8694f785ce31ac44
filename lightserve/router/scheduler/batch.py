"""The requests that run in the workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import NO_INT32, NO_INT64, Int32Array, Int64Array, Tails, int32s
from lightserve.messages.step import TokenColumns
from lightserve.router.crash_isolation import CrashIsolation
from lightserve.router.kv.pool import KvPool
from lightserve.router.req import Req
from lightserve.router.req_columns import ReqColumns
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.lora_slots import LoraSlots


class RunningBatch:
    """Admitted requests in the order of admission, and the requests that the workers hold.

    What every step needs of all requests is in ``columns``. ``rows`` are the rows of the requests, in their order.
    """

    def __init__(self, pool: KvPool, isolation: CrashIsolation, loras: LoraSlots, max_running: int) -> None:
        self.pool = pool
        self.loras = loras
        self.isolation = isolation
        self.columns = ReqColumns(max_running)
        self.rows: Int64Array = NO_INT64
        self.max_tokens = 0  # prompts and longest outputs of all requests
        self.num_background = 0  # requests that nobody waits for
        self.num_changes = 0  # how often a request has entered or left
        self._num_admitted = 0
        self._eos_ids: set[int] = set()  # of all requests so far: the model has few
        self._ends = NO_INT32  # the same
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._at: list[Req | None] = [None] * max_running  # by row
        self._in_workers: set[int] = set()  # requests that have a row in the workers after the last planned step
        self._released: dict[int, None] = {}  # requests that left since then, in order
        self._reqs: dict[int, Req] = {}
        self._row_of: dict[int, int] = {}
        pool.groups.bind(self)

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def __contains__(self, req: Req) -> bool:
        return req.req_id in self._reqs

    def find(self, req_id: int) -> Req | None:
        return self._reqs.get(req_id)

    def at(self, rows: Int64Array) -> list[Req]:
        """The requests in these rows."""
        reqs = [self._at[row] for row in rows.tolist()]
        return [req for req in reqs if req is not None]

    def rows_of(self, req_ids: Int64Array) -> Int64Array:
        """The rows of requests by their ids; -1 of those that do not run."""
        rows = map(self._row_of.get, req_ids.tolist(), repeat(-1))
        return np.fromiter(rows, dtype=np.int64, count=len(req_ids))

    def req_ids(self, rows: Int64Array) -> Int64Array:
        return np.array([req.req_id for req in self.at(rows)], dtype=np.int64)

    def unplanned(self) -> Int64Array:
        """Req.unplanned of each request."""
        return self.columns.unplanned(self.rows)

    def rows_of_clients(self, rows: Int64Array) -> Int64Array:
        """Those of these rows whose requests are not background requests."""
        return rows[self.columns.is_background[rows] == 0] if self.num_background else rows

    def has_in_flight(self) -> bool:
        """Whether a step in flight will return a token of some request, or has drafts of it."""
        columns = self.columns
        return bool(((columns.in_flight(self.rows) > 0) | (columns.planned_drafts[self.rows] > 0)).any())

    def add(self, req: Req) -> None:
        row = self._free_rows.pop()
        req.move_to(self.columns, row)
        self.num_changes += 1
        self.num_background += req.is_background
        self._num_admitted += 1
        self.columns.admission[row] = self._num_admitted
        self._at[row] = self._reqs[req.req_id] = req
        self._row_of[req.req_id] = row
        self.rows = np.append(self.rows, row)
        self.max_tokens += len(req.prompt_ids) + req.max_new_tokens
        if not self._eos_ids.issuperset(req.eos_ids):
            self._eos_ids.update(req.eos_ids)
            self._ends = np.array(sorted(self._eos_ids), dtype=np.int32)
        self.loras.acquire(req)
        self.pool.groups.enter(req)

    def may_end(self, tokens: TokenColumns) -> npt.NDArray[np.bool_]:
        """Which of these requests get an end token. They may ignore it."""
        token_ids = int32s(tokens.token_ids)
        # one comparison takes 3 us instead of 50
        is_end = token_ids == self._ends[0] if len(self._ends) == 1 else np.isin(token_ids, self._ends)
        if len(tokens.counts) and len(is_end):
            is_end = np.logical_or.reduceat(is_end, np.cumsum(tokens.counts) - tokens.counts)
        ends: npt.NDArray[np.bool_] = is_end
        return ends

    def release(self, req: Req) -> None:
        """Remove a request from the workers and free its KV."""
        self.isolation.release(req)
        self.pool.release(req)
        self._remove(req)
        self.loras.release(req)
        self._released[req.req_id] = None

    def plan_decodes(self, decodes: Decodes, slots: Int32Array) -> None:
        """The next step computes one more token of each of these requests, and samples the next."""
        columns, (rows, draft_counts, slot_counts) = self.columns, decodes
        self._append(columns.slots, rows, slots, slot_counts)
        columns.planned_len[rows] += 1
        columns.planned_outputs[rows] += 1
        if len(draft_counts):
            columns.planned_drafts[rows] += draft_counts
            columns.spare_slots[rows] += slot_counts - 1
            columns.has_drafted[rows[draft_counts > 0]] = 1

    def _append(self, tails: Tails, rows: Int64Array, values: Int32Array, counts: Int32Array) -> None:
        """``counts`` values to each of these rows, perhaps none; empty: one each."""
        if len(counts):
            rows, counts = rows[counts > 0], counts[counts > 0]
        for req in self.at(np.array(tails.full(rows, counts if len(counts) else 1), dtype=np.int64)):
            req.flush()
        tails.append(rows, values, counts)

    def add_outputs(self, rows: Int64Array, token_ids: Int32Array, counts: Int32Array = NO_INT32) -> None:
        """Each of these requests has got ``counts`` more tokens, which do not end it; empty: one each."""
        columns = self.columns
        self._append(columns.outputs, rows, token_ids, counts)
        if len(counts):
            columns.accept(rows)
        columns.output_len[rows] += counts if len(counts) else 1
        columns.planned_outputs[rows] = np.maximum(columns.planned_outputs[rows], columns.output_len[rows])

    @property
    def has_rows_to_free(self) -> bool:
        return not self._in_workers.isdisjoint(self._released)

    def take_new_and_freed(self, admitted: Iterable[Req]) -> tuple[list[Req], list[int]]:
        """Return the requests that enter the workers with the next step, and the ids that the workers free before it.

        A request may be preempted and admitted again between two steps, in either order: what the workers have to do
        depends on whether they hold the request, and on whether it runs now.
        """
        free = [req_id for req_id in self._released if req_id in self._in_workers]
        new = [req for req in admitted if req in self]
        self._released.clear()
        self._in_workers.difference_update(free)
        self._in_workers.update(req.req_id for req in new)
        return new, free

    def clear(self) -> list[Req]:
        """The workers hold no requests any more. Returns the requests that ran; they keep what they hold."""
        reqs = list(self)
        for req in reqs:
            self._remove(req)
        self.loras.clear()
        self._released.clear()
        self._in_workers.clear()
        return reqs

    def _remove(self, req: Req) -> None:
        self.num_changes += 1
        self.num_background -= req.is_background
        row = req.row
        del self._reqs[req.req_id], self._row_of[req.req_id]
        self.columns.admission[row] = 0
        req.move_to(ReqColumns(1), 0)
        self._at[row] = None
        self._free_rows.append(row)
        self.rows = self.rows[self.rows != row]
        self.max_tokens -= len(req.prompt_ids) + req.max_new_tokens
