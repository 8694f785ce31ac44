"""The scheduler's interface to the router's loop, the offline LLM and the simulator.

It plans one or more attention groups, of which each has its requests and its KV. With data-parallel attention the ranks
of all groups share the experts, so a rank that left out a step would stop all others: if any group has something to
compute, every group gets a step, perhaps one without rows. If none has, there is no step at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.int_arrays import Int64Array, int64s
from lightserve.messages.params import FinishReason
from lightserve.messages.step import NO_TOKENS, DraftColumns, ReqFailed, Step, TokenColumns, TokenOut
from lightserve.router.req import Req
from lightserve.router.scheduler.group import GroupScheduler, GroupStep
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.placement import choose_group, load_of
from lightserve.router.scheduler.planner import PlannedStep, PrefillChunk


class ReqTokens(NamedTuple):
    """The tokens that a request has got from a step. The last of them may have ended it."""

    req: Req
    outs: Sequence[TokenOut]


class Scheduler:
    def __init__(self, *groups: GroupScheduler) -> None:
        """One group is the usual case; several: data-parallel attention."""
        self.groups = groups
        # what the groups compute in each step, oldest first; a group without rows has nothing in it
        self._in_flight: deque[dict[GroupScheduler, PlannedStep]] = deque()
        self._num_turns = 0  # of groups with requests that may crash the workers

    @property
    def only_group(self) -> GroupScheduler:
        """For what is refused with several groups: see config/combinations.py."""
        (group,) = self.groups
        return group

    @property
    def limits(self) -> SchedulerLimits:
        """Those of each group."""
        return self.groups[0].limits

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room only."""
        return sum(len(group.queue) for group in self.groups)

    @property
    def num_blocked(self) -> int:
        """Requests that wait for an event: for KV, an adapter, a prefix, or to be released."""
        return sum(group.queue.num_blocked for group in self.groups)

    @property
    def num_running(self) -> int:
        return sum(len(group.batch) for group in self.groups)

    @property
    def num_preemptions(self) -> int:
        return sum(group.preemption.count for group in self.groups)

    @property
    def is_isolating_crash(self) -> bool:
        """If so, no step may be planned before the tokens of the last are back: see CrashIsolation."""
        return any(group.isolation.is_active for group in self.groups)

    def add(self, req: Req, group: GroupScheduler | None = None) -> None:
        """``group``: None: any."""
        group = group or self._choose_group(req)
        group.fork_points.give_keys(req)
        group.queue.add(req)
        self._wait_for_tokens(req, group)

    def defer(self, req: Req, runs_alone: bool = False) -> None:
        """Queue a request that may not be admitted before ``make_ready``: the workers prepare its grammar or adapter.

        ``runs_alone``: until its next token, because it may have crashed the workers of another engine.
        """
        group = self._choose_group(req)
        group.fork_points.give_keys(req)
        group.queue.defer(req)
        if runs_alone:
            group.isolation.require(req)

    def make_ready(self, req: Req) -> None:
        """Let a held request be admitted. Nothing happens if it has ended."""
        for group in self.groups:
            group.queue.make_ready(req)
            if group.queue.is_ready(req):
                self._wait_for_tokens(req, group)

    def _choose_group(self, req: Req) -> GroupScheduler:
        if len(self.groups) == 1:
            return self.groups[0]
        for group in self.groups:
            if any(req.req_id in step.req_ids for step in self._steps_of(group)):
                return group  # it waits for those tokens there: other groups would give them to it
        return self.groups[choose_group([load_of(group, req) for group in self.groups])]

    def _wait_for_tokens(self, req: Req, group: GroupScheduler) -> None:
        """A request that moved away may come back before the tokens of its last steps, and must not get them again."""
        steps = [step for step in self._steps_of(group) if req.req_id in step.req_ids]
        if steps:
            group.queue.block(req, steps[-1].completed)

    def _steps_of(self, group: GroupScheduler) -> list[PlannedStep]:
        """In flight, oldest first."""
        return [steps[group] for steps in self._in_flight if group in steps]

    def needs_on_host(self, lora_id: int) -> bool:
        """Whether a step in flight, or the next one, copies this adapter to the device."""
        in_flight = (step for steps in self._in_flight for step in steps.values())
        return any(lora_id in step.loras for step in in_flight) or any(
            group.loras.is_copied(lora_id) for group in self.groups
        )

    def next_step(self, now_s: float = 0.0) -> Step | None:
        """What all groups compute next; None if there is nothing beyond the steps in flight."""
        steps = self._plan(now_s)
        if not steps:
            return None
        self._in_flight.append({group: step.planned for group, step in steps.items()})
        if len(self.groups) == 1:
            return steps[self.groups[0]].message
        return Step([], groups=[steps[group].message if group in steps else Step([]) for group in self.groups])

    def _plan(self, now_s: float) -> dict[GroupScheduler, GroupStep]:
        """A request that may crash the workers runs alone in all groups. While it cannot run, other groups go on.

        Of the groups that have such requests, one has rows in a step. They take turns.
        """
        self._num_turns += 1
        isolating = deque(group for group in self.groups if group.isolation.is_active)
        if not isolating:
            return _plan_groups(self.groups, now_s)
        isolating.rotate(self._num_turns)
        steps: dict[GroupScheduler, GroupStep] = {}
        for group in sorted(isolating, key=lambda group: not group.isolation.isolated):
            steps = _plan_groups((group,), now_s)
            if group.isolation.isolated:
                return steps
            if steps:
                break
        return steps | _plan_groups((group for group in self.groups if group not in isolating), now_s)

    def complete_step(self, seconds: float | None = None) -> list[PrefillChunk]:
        """The oldest step in flight is back: the KV that it computed is certain. Returns its prompt chunks.

        ``seconds``: how long it took, if that is known. This is the time of the group with the most tokens; the others
        waited for it.
        """
        steps = self._in_flight.popleft()
        slowest = _with_most_tokens(steps)
        for group, step in steps.items():
            group.complete(step, seconds if group in slowest else None)
        return [chunk for step in steps.values() for chunk in step.prefills]

    def process_plain(self, tokens: TokenColumns) -> npt.NDArray[np.bool_]:
        """Give these requests their tokens, if none of them is the first or perhaps the last.

        Returns which requests have got theirs. ``process_req`` takes the others.
        """
        if len(self.groups) == 1:
            return self.groups[0].process_plain(tokens)
        is_known = np.zeros(len(tokens), dtype=np.bool_)
        for group in self.groups:
            is_here = group.runs(int64s(tokens.req_ids))
            is_known[is_here] = group.process_plain(tokens.where(is_here))
        return is_known

    def process_drafts(self, drafts: DraftColumns, proposals: TokenColumns = NO_TOKENS) -> None:
        """Learn from the drafts of a step how many the requests should have, and take those for their next steps.

        Call it before the requests get the tokens of the step.
        """
        for group in self.groups:
            if len(drafts):
                group.observe_drafts(drafts)
            if len(proposals):
                group.take_proposals(proposals)

    def observe_gaps(self, req_ids: Int64Array, now: float) -> tuple[list[float], list[int]]:
        """These requests, which run, have got a token now. Returns the times since their last ones, and how often."""
        if len(self.groups) == 1:
            return self.groups[0].observe_gaps(req_ids, now)
        observed = [group.observe_gaps(req_ids[group.runs(req_ids)], now) for group in self.groups]
        return [gap for gaps, _ in observed for gap in gaps], [count for _, counts in observed for count in counts]

    def process_req(self, outs: Sequence[TokenOut]) -> ReqTokens | None:
        """Give a request the tokens of a step, and release it if it is finished. None if it has ended before."""
        for group in self.groups:
            if (req := group.find_in_flight(outs[0].req_id)) is None:
                continue
            num_accepted = req.num_accepted
            added = req.add_tokens(outs)
            group.num_forced += max(len(added) - 1 - num_accepted, 0)
            if group.isolation.is_active:
                group.isolation.clear(req)
            if req.finish_reason is not None:
                group.finish(req)
            return ReqTokens(req, added)
        return None

    def process_embedding(self, req_id: int) -> Req | None:
        """The result of a pooling request is back, which ends it. None if it has ended before."""
        for group in self.groups:
            if (req := group.find_in_flight(req_id)) is not None:
                req.finish_reason = FinishReason.STOP
                group.drop(req)
                return req
        return None

    def fail(self, failure: ReqFailed) -> Req | None:
        """End a request that failed in a step. None if it has ended before."""
        for group in self.groups:
            if (req := group.find_in_flight(failure.req_id)) is not None:
                req.fail()
                group.drop(req)
                if failure.status >= 500:
                    group.pool.discard(req)
                return req
        return None

    def abort(self, req_id: int) -> Req | None:
        """Drop a request, whether it waits or runs. None if it has ended."""
        for group in self.groups:
            if (req := group.find(req_id)) is not None:
                group.drop(req)
                return req
        return None

    def drop(self, predicate: Callable[[Req], bool]) -> list[Req]:
        """Drop requests, whether they wait or run, and return them."""
        dropped = []
        for group in self.groups:
            leaving = [req for req in (*group.queue, *group.batch) if predicate(req)]
            for req in leaving:
                group.drop(req)
            dropped += leaving
        return dropped

    def clear_cache(self) -> None:
        """No step is in flight. Move all running requests back into the queue, and drop all cached prefixes."""
        for group in self.groups:
            for req in list(group.batch):
                group.preemption.preempt(req)
            group.pool.clear_cache()

    def cancel_steps(self) -> None:
        """The steps in flight failed, and the workers have freed all requests. Drops all requests.

        It is unknown what those steps computed, so their slots are freed, also those in the prefix cache.
        """
        for group in self.groups:
            group.cancel(self._steps_of(group))
        self._in_flight.clear()

    def reset(self) -> None:
        """Drop all requests and all KV. The workers have freed all requests."""
        for group in self.groups:
            group.reset()
        self._in_flight.clear()

    def recover_from_crash(self) -> Req | None:
        """The workers died. All requests continue from their tokens in new workers, which hold no KV.

        Returns the crashing request if it is known; it is dropped. All groups lose their KV: each has a share of the
        experts.
        """
        crashing = [group.recover_from_crash(self._steps_of(group)) for group in self.groups]
        self._in_flight.clear()
        return next((req for req in crashing if req is not None), None)


def _plan_groups(groups: Iterable[GroupScheduler], now_s: float) -> dict[GroupScheduler, GroupStep]:
    """Those that have something to compute."""
    return {group: step for group in groups if (step := group.plan(now_s)) is not None}


def _with_most_tokens(steps: dict[GroupScheduler, PlannedStep]) -> list[GroupScheduler]:
    if len(steps) == 1:  # as usual: nothing is counted
        return list(steps)
    most = max(step.num_tokens for step in steps.values())
    return [group for group, step in steps.items() if step.num_tokens == most]
