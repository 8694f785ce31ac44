"""The requests that wait for admission, in the order of a policy."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

from lightserve.router.policy import LOOK_AHEAD, CachedLen, Policy
from lightserve.router.req import Req


class ReqQueue:
    """Preempted requests go before all others, oldest first: they have begun, and a client is reading.

    Held requests are not ready to be admitted. They do not count in ``len``, which is the number of requests that
    could run if there were room.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: list[tuple[float, int, Req]] = []  # sorted by rank, then by arrival
        self._preempted: list[Req] = []  # sorted by arrival
        self._held: dict[int, Req] = {}  # by id
        self.num_tokens = 0  # prompt tokens of all requests, also of held ones
        self.num_changes = 0  # how often a request has come, gone, or been held or released
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def __iter__(self) -> itertools.chain[Req]:
        return itertools.chain(self._preempted, (req for _, _, req in self._waiting), self._held.values())

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, req: Req) -> None:
        if req.output_len:  # it has begun in another engine
            self.add_preempted(req)
            return
        self._count(req)
        bisect.insort(self._waiting, (self._policy.rank(req), next(self._arrivals), req), key=lambda entry: entry[:2])

    def hold(self, req: Req) -> None:
        self._count(req)
        self._held[req.req_id] = req

    def release(self, req: Req) -> None:
        """Let a held request be admitted. It may have ended meanwhile."""
        if self._held.pop(req.req_id, None) is None:
            return
        self.num_tokens -= len(req.prompt_ids)
        if req.num_admissions:  # it was preempted
            self.add_preempted(req)
        else:
            self.add(req)

    def hold_again(self, is_meant: Callable[[Req], bool]) -> list[Req]:
        """Hold requests of the queue, and return them."""
        held = [req for req in self if is_meant(req)]
        self._preempted = [req for req in self._preempted if not is_meant(req)]
        self._waiting = [entry for entry in self._waiting if not is_meant(entry[2])]
        self._held |= {req.req_id: req for req in held}
        self.num_changes += 1
        return held

    def add_preempted(self, req: Req) -> None:
        self._count(req)
        bisect.insort(self._preempted, req, key=lambda one: one.arrived_s)

    def clear(self) -> None:
        self.num_changes += 1
        self.num_tokens = 0
        self._waiting.clear()
        self._preempted.clear()
        self._held.clear()

    def candidates(self, cached_len: CachedLen) -> list[Req]:
        """The requests that may be admitted now, in order. They stay in the queue until ``remove``."""
        first = [req for _, _, req in self._waiting[:LOOK_AHEAD]]
        return self._preempted + self._policy.order(first, cached_len)

    def remove(self, req: Req) -> None:
        self.num_changes += 1
        self.num_tokens -= len(req.prompt_ids)
        if self._held.pop(req.req_id, None) is not None:
            return
        if req in self._preempted:
            self._preempted.remove(req)
            return
        index = next(i for i, (_, _, one) in enumerate(self._waiting) if one is req)
        del self._waiting[index]
        for _, _, passed in self._waiting[:index]:
            passed.num_passed_over += 1

    def find(self, req_id: int) -> Req | None:
        return next((req for req in self if req.req_id == req_id), None)

    def find_preempted(self, req_id: int) -> Req | None:
        return next((req for req in self._preempted if req.req_id == req_id), None)

    def _count(self, req: Req) -> None:
        self.num_changes += 1
        self.num_tokens += len(req.prompt_ids)
