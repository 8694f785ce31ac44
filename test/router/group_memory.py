"""What a worker holds for a KV group, and what it checks when a step reads it. For the brute-force tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from lightserve.messages.control import SlidingWindowKv
from lightserve.messages.step import StepRow
from lightserve.router.kv.group_pool import KvGroupPool
from lightserve.router.kv.group_slots import NONE
from lightserve.router.kv.sliding_window import SlidingWindowPool
from lightserve.router.kv.state_pool import StatePool


class WorkerReq(Protocol):
    """A request of the worker: see KvReq."""

    slots: list[int]  # by position
    prefixes: list[int]  # what stands for the tokens up to each position
    root: int  # the prefix of no tokens
    computed: int  # its first tokens


class GroupMemory(ABC):
    """A step calls ``begin_step``, then ``write`` and ``reject`` for its tokens, then ``end_req``."""

    def __init__(self, size: int) -> None:
        self._kv: list[int | None] = [None] * size

    @abstractmethod
    def enter(self, req_id: int, num_cached: int, slots: Sequence[int]) -> None:
        """A request with so many cached tokens enters."""

    @abstractmethod
    def begin_step(
        self, rows: list[StepRow], reqs: Mapping[int, WorkerReq], slots: Sequence[int], snapshots: Sequence[int]
    ) -> None:
        """The requests do not have the slots of these rows yet."""

    @abstractmethod
    def written(self, req_id: int, begin: int, count: int) -> list[int]:
        """The slots to which a step writes that computes these tokens."""

    @abstractmethod
    def write(self, req_id: int, req: WorkerReq, position: int) -> None:
        """The request computes the token at this position."""

    @abstractmethod
    def reject(self, req_id: int, position: int) -> None:
        """The step has computed a draft there that was not accepted."""

    @abstractmethod
    def end_req(self, req_id: int, req: WorkerReq, count: int) -> None:
        """The request has computed ``count`` more tokens, and all requests of the step have written."""

    def fail(self, slots: Iterable[int]) -> None:
        """The step that was to write to these slots has failed."""
        for slot in slots:
            self._kv[slot] = None


class WindowMemory(GroupMemory):
    """Keys and values of layers with a sliding window."""

    def __init__(self, figures: SlidingWindowKv) -> None:
        super().__init__(figures.size)
        self._figures = figures
        self._slots: dict[int, dict[int, int]] = {}  # by request and position

    def enter(self, req_id: int, num_cached: int, slots: Sequence[int]) -> None:
        self._slots[req_id] = dict(enumerate(slots, start=num_cached - len(slots)))

    def begin_step(
        self, rows: list[StepRow], reqs: Mapping[int, WorkerReq], slots: Sequence[int], snapshots: Sequence[int]
    ) -> None:
        assert len(slots) == sum(len(row.slots) for row in rows)
        left = iter(slots)
        for row in rows:
            begin = len(reqs[row.req_id].slots)
            self._slots[row.req_id].update({begin + place: next(left) for place in range(len(row.slots))})

    def written(self, req_id: int, begin: int, count: int) -> list[int]:
        return [self._slots[req_id][position] for position in range(begin, begin + count)]

    def write(self, req_id: int, req: WorkerReq, position: int) -> None:
        self._kv[self._slots[req_id][position]] = req.prefixes[position]

    def reject(self, req_id: int, position: int) -> None:
        self._kv[self._slots[req_id][position]] = None

    def end_req(self, req_id: int, req: WorkerReq, count: int) -> None:
        """Read the windows of these tokens, and the tokens before them that must be kept, if the request had them."""
        end, slots = req.computed, self._slots[req_id]
        first = max(end - count + 1 - self._figures.window, 0)
        kept = [p for p in range(max(end - count - self._figures.kept_tokens, 0), first) if p in slots]
        for position in [*kept, *range(first, end)]:
            held = self._kv[slots[position]]
            assert held == req.prefixes[position], "a windowed slot does not hold the token that is read from it"


class StateMemory(GroupMemory):
    """Rows of recurrent state: each holds what stands for all tokens that it has seen."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._row: dict[int, int] = {}  # that a request has written last
        self._snapshots: dict[int, tuple[int, int]] = {}  # of a step, by request: rows, and tokens before

    def enter(self, req_id: int, num_cached: int, slots: Sequence[int]) -> None:
        assert len(slots) == (num_cached > 0), "a request with cached tokens continues one state"
        self._row[req_id] = slots[0] if len(slots) else NONE

    def begin_step(
        self, rows: list[StepRow], reqs: Mapping[int, WorkerReq], slots: Sequence[int], snapshots: Sequence[int]
    ) -> None:
        """All requests of a step read before one writes: kernels do not, so no other may write what one reads."""
        req_ids = [row.req_id for row in rows]
        slots, rows_of_snapshots = slots[: len(rows)], slots[len(rows) :]
        read = {self._row[req_id] for req_id in req_ids}
        assert not set(rows_of_snapshots) & read, "a row is read, and a snapshot written to it"
        owners = [req_ids[number] for number in snapshots[::2]]
        self._snapshots = dict(zip(owners, zip(rows_of_snapshots, snapshots[1::2], strict=True), strict=True))
        assert all(0 < self._snapshots[row.req_id][1] < len(row.slots) for row in rows if row.req_id in owners)
        for req_id, slot in zip(req_ids, slots, strict=True):
            req, row = reqs[req_id], self._row[req_id]
            if req.computed:
                assert self._kv[row] == req.prefixes[req.computed - 1], "a row does not hold the state that is read"
            assert all(slot != self._row[one] for one in req_ids if one != req_id), "a row is read and written at once"
        self._row.update(zip(req_ids, slots, strict=True))

    def written(self, req_id: int, begin: int, count: int) -> list[int]:
        of_snapshot = [self._snapshots[req_id][0]] if req_id in self._snapshots else []
        return [self._row[req_id], *of_snapshot]

    def write(self, req_id: int, req: WorkerReq, position: int) -> None:
        """The state is written once, after all tokens of the step."""

    def reject(self, req_id: int, position: int) -> None:
        """The state never sees it."""

    def end_req(self, req_id: int, req: WorkerReq, count: int) -> None:
        self._kv[self._row[req_id]] = req.prefixes[req.computed - 1]
        if req_id in self._snapshots:
            row, before = self._snapshots[req_id]
            self._kv[row] = req.prefixes[req.computed - count + before - 1]


def memory_of(pool: KvGroupPool) -> GroupMemory:
    if isinstance(pool, SlidingWindowPool):
        return WindowMemory(pool.figures)
    assert isinstance(pool, StatePool)
    return StateMemory(pool.size)
