"""Data-parallel attention: one scheduler for each group of ranks, and all groups compute a step at the same time.

The ranks of all groups share the experts, so a rank that left out a step would stop all others. One process plans for
all groups: if any group has something to compute, every group gets a step, perhaps one without rows. If none has, there
is no step at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.int_arrays import Int64Array, int64s
from lightserve.messages.step import ReqFailed, Step, TokenColumns, TokenOut
from lightserve.router.req import Req
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.planner import PrefillChunk
from lightserve.router.scheduler.scheduler import ReqTokens, Scheduler

MAX_LOAD_FACTOR = 1.25  # of the mean number of requests: beyond it a group gets none, whatever it has cached

T = TypeVar("T")


class GroupLoad(NamedTuple):
    """What a group has, when a request is to be placed."""

    open_requests: int
    kv_tokens: int  # that its requests use, and the prompts that wait
    cached_tokens: int  # of the request's prompt
    unused_tokens: int = 0  # in the prefix cache, that no request uses


class PlannedPart(NamedTuple):
    """What a group computes in a step in flight. Groups that planned nothing have none."""

    group: Scheduler
    num_tokens: int


def choose_group(loads: Sequence[GroupLoad]) -> int:
    """The group that gets a request: of those that have the most of its prompt cached, the one with the fewest tokens.

    All groups wait for the one with the most tokens, so none may have many more requests than the others. Cached tokens
    count in whole blocks: most prompts have a few first tokens in common. Idle groups take turns, by what they cache.
    """
    most_requests = MAX_LOAD_FACTOR * (sum(load.open_requests for load in loads) + 1) / len(loads)
    may_take = [load.open_requests < most_requests for load in loads]
    return min(
        (group for group, is_free in enumerate(may_take) if is_free),
        key=lambda group: (
            -(loads[group].cached_tokens // BLOCK_TOKENS),
            loads[group].kv_tokens,
            loads[group].open_requests,
            loads[group].unused_tokens,
        ),
    )


class LockstepScheduler:
    """As a Scheduler to the router, which sends its steps to the ranks of all groups.

    A request stays in its group until it ends. Adapters, KV tiers and KV of other engines are not supported.
    """

    def __init__(self, groups: Sequence[Scheduler]) -> None:
        self.groups = groups
        self._in_flight: deque[list[PlannedPart]] = deque()  # oldest first
        self._num_turns = 0  # of groups with requests that may crash the workers

    @property
    def limits(self) -> SchedulerLimits:
        """Those of each group."""
        return self.groups[0].limits

    @property
    def num_waiting(self) -> int:
        return sum(group.num_waiting for group in self.groups)

    @property
    def num_blocked(self) -> int:
        return sum(group.num_blocked for group in self.groups)

    @property
    def num_running(self) -> int:
        return sum(group.num_running for group in self.groups)

    @property
    def num_preemptions(self) -> int:
        return sum(group.num_preemptions for group in self.groups)

    @property
    def num_forced(self) -> int:
        return sum(group.num_forced for group in self.groups)

    @property
    def is_isolating_crash(self) -> bool:
        return any(group.is_isolating_crash for group in self.groups)

    def add(self, req: Req) -> None:
        self._choose(req).add(req)

    def hold(self, req: Req) -> None:
        self._choose(req).hold(req)

    def release(self, req: Req) -> None:
        for group in self.groups:
            group.release(req)

    def next_step(self, now_s: float = 0.0) -> Step | None:
        """A step for every group; None if no group has anything to compute beyond the steps in flight."""
        steps = self._plan_groups(now_s)
        parts = [PlannedPart(group, step.num_tokens) for group, step in steps.items() if step is not None]
        if not parts:
            return None
        self._in_flight.append(parts)
        return Step([], groups=[steps.get(group) or Step([]) for group in self.groups])

    def _plan_groups(self, now_s: float) -> dict[Scheduler, Step | None]:
        """A request that may crash the workers runs alone in all groups. While it cannot run, other groups go on.

        Of the groups that have such requests, one has rows in a step. They take turns.
        """
        isolating = deque(group for group in self.groups if group.is_isolating_crash)
        self._num_turns += 1
        isolating.rotate(self._num_turns)
        steps: dict[Scheduler, Step | None] = {}
        for group in sorted(isolating, key=lambda group: not group.isolation.isolated):
            steps[group] = group.next_step(now_s)
            if group.isolation.isolated:
                return steps
            if steps[group] is not None:
                break
        return steps | {group: group.next_step(now_s) for group in self.groups if group not in isolating}

    def complete_step(self, seconds: float | None = None) -> list[PrefillChunk]:
        """``seconds`` are those of the group with the most tokens; the others waited for it."""
        parts = self._in_flight.popleft()
        most = max(part.num_tokens for part in parts)
        return [
            chunk
            for group, num_tokens in parts
            for chunk in group.complete_step(seconds if num_tokens == most else None)
        ]

    def process_plain(self, tokens: TokenColumns) -> npt.NDArray[np.bool_]:
        is_known = np.zeros(len(tokens), dtype=np.bool_)
        for group in self.groups:
            own = group.runs(int64s(tokens.req_ids))
            is_known[own] = group.process_plain(tokens.where(own))
        return is_known

    def observe_gaps(self, req_ids: Int64Array, now: float) -> tuple[list[float], list[int]]:
        gaps: list[float] = []
        counts: list[int] = []
        for group in self.groups:
            own_gaps, own_counts = group.observe_gaps(req_ids[group.runs(req_ids)], now)
            gaps += own_gaps
            counts += own_counts
        return gaps, counts

    def process_req(self, outs: Sequence[TokenOut]) -> ReqTokens | None:
        return self._first(lambda group: group.process_req(outs))

    def process_embedding(self, req_id: int) -> Req | None:
        return self._first(lambda group: group.process_embedding(req_id))

    def fail(self, failure: ReqFailed) -> Req | None:
        return self._first(lambda group: group.fail(failure))

    def abort(self, req_id: int) -> Req | None:
        return self._first(lambda group: group.abort(req_id))

    def drop(self, is_meant: Callable[[Req], bool]) -> list[Req]:
        return [req for group in self.groups for req in group.drop(is_meant)]

    def recover_from_crash(self) -> Req | None:
        """All groups lose their KV with the workers: each of them has a part of the experts."""
        self._in_flight.clear()
        crashing = [group.recover_from_crash() for group in self.groups]
        return next((req for req in crashing if req is not None), None)

    def _choose(self, req: Req) -> Scheduler:
        for group in self.groups:
            if group.has_in_flight(req.req_id):
                return group  # it waits for those tokens there: other groups would give them to it
        return self.groups[choose_group([_load_of(group, req) for group in self.groups])]

    def _first(self, ask: Callable[[Scheduler], T | None]) -> T | None:
        """What the group that has the request returns."""
        return next((found for group in self.groups if (found := ask(group)) is not None), None)


def _load_of(group: Scheduler, req: Req) -> GroupLoad:
    open_requests = group.num_running + group.num_waiting + group.num_blocked
    cached = group.pool.cached_len(req) if req.shares_prefix else 0
    kv_tokens = group.pool.used + group.queue.num_tokens
    return GroupLoad(open_requests, kv_tokens, cached, group.pool.cached_tokens)
