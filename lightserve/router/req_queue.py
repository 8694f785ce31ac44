"""The requests that wait for admission, in the order of a policy."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from lightserve.router.policy import LOOK_AHEAD, CachedLen, Policy
from lightserve.router.req import Req

Place = tuple[int, float, int]  # in the queue: one of the kinds below, then by the policy, then by arrival

# Requests that have run go before others: a client is reading. All requests of clients go before background requests.
BEGUN, NEW, BACKGROUND_BEGUN, BACKGROUND_NEW = range(4)

_place = attrgetter("queue_place")


@dataclass(slots=True, eq=False)
class QueuedReq:
    req: Req
    queue_place: Place
    wait: Wait | None = None  # None: it could run if there were room
    blocked_at: int = 0  # ``num_admitted`` when it was blocked


@dataclass(slots=True, eq=False)
class Wait:
    """An event that requests wait for before they can be admitted, and the time at which they stop waiting for it."""

    deadline_s: float = math.inf
    on_late: Callable[[Req], object] = lambda req: None  # the deadline has passed
    blocked: list[QueuedReq] = field(init=False, default_factory=list)  # the requests, by place
    queue: ReqQueue = field(init=False)  # of these requests

    def end(self) -> None:
        """The event has happened: the requests come back to their places."""
        for entry in tuple(self.blocked):
            self.queue.unblock(entry)

    def continue_with(self, wait: Wait) -> None:
        """The event has happened, and the requests wait for another one."""
        for entry in tuple(self.blocked):
            self.queue.block(entry.req, wait)


class ReqQueue:
    """Requests are ready, in the order of their places, or blocked: then they come back to their places by an event.

    ``len`` is the number of ready requests, which could run if there were room.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: dict[int, QueuedReq] = {}  # all, by id
        self._ready: list[QueuedReq] = []  # by place
        self._deferred = Wait()  # until ``make_ready``
        self._deadlines: list[tuple[float, int, Wait]] = []  # a heap; some of the waits are over
        self._count = itertools.count()
        self.num_tokens = 0  # prompt tokens of all requests
        self.num_changes = 0  # how often a request has come, gone, been blocked or come back
        self.num_admitted = 0

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Req]:
        """Ready and blocked requests."""
        return iter([entry.req for entry in self._entries.values()])

    @property
    def num_of_clients(self) -> int:
        """Ready requests that are not background requests."""
        return self._index_of(BACKGROUND_BEGUN)

    @property
    def num_blocked(self) -> int:
        return len(self._entries) - len(self._ready)

    def add(self, req: Req) -> None:
        self._put(req, self._new_place(req))

    def add_preempted(self, req: Req) -> None:
        self._put(req, self._begun_place(req))

    def defer(self, req: Req) -> None:
        """Add a request that is blocked until ``make_ready``."""
        self.add(req)
        self.block(req, self._deferred)

    def make_ready(self, req: Req) -> None:
        """Let a held request be admitted. It may have ended meanwhile."""
        entry = self._entries.get(req.req_id)
        if entry is not None and entry.wait is self._deferred:
            self.unblock(entry)

    def defer_again(self, predicate: Callable[[Req], bool]) -> list[Req]:
        """Hold requests of the queue, and return them."""
        deferred = [req for req in self if predicate(req)]
        for req in deferred:
            self.block(req, self._deferred)
        return deferred

    def block(self, req: Req, wait: Wait) -> None:
        """The request is not ready before the event or its deadline."""
        entry = self._entries[req.req_id]
        self._leave(entry)
        if wait.deadline_s < math.inf and not wait.blocked:
            heapq.heappush(self._deadlines, (wait.deadline_s, next(self._count), wait))
        entry.wait, entry.blocked_at = wait, self.num_admitted
        wait.queue = self
        bisect.insort(wait.blocked, entry, key=_place)

    def unblock(self, entry: QueuedReq) -> None:
        self._leave(entry)
        bisect.insort(self._ready, entry, key=_place)

    def end_late_waits(self, now_s: float) -> None:
        """Requests whose deadlines for events have passed come back."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            wait = heapq.heappop(self._deadlines)[2]
            for entry in tuple(wait.blocked):
                self.unblock(entry)
                wait.on_late(entry.req)

    def next_deadline_s(self) -> float | None:
        """When a request stops waiting for an event; None: none will."""
        while self._deadlines and not self._deadlines[0][2].blocked:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def end_waits(self) -> None:
        """All events have happened, except that held requests are released."""
        for entry in self._entries.values():
            if entry.wait is not None and entry.wait is not self._deferred:
                self.unblock(entry)

    def clear(self) -> None:
        for req in self:
            self.remove(req)

    def candidates(self, cached_len: CachedLen) -> Iterator[Req]:
        """The ready requests in order. The caller admits or blocks one before it takes the next, or skips it if it has
        begun, or stops."""
        for begun, new in ((BEGUN, NEW), (BACKGROUND_BEGUN, BACKGROUND_NEW)):
            yield from [entry.req for entry in self._ready[self._index_of(begun) : self._index_of(new)]]
            while True:
                begin = self._index_of(new)
                first = [entry.req for entry in self._ready[begin : min(begin + LOOK_AHEAD, self._index_of(new + 1))]]
                yield from self._policy.order(first, cached_len)
                if not first:
                    break
                if self.is_ready(first[0]):
                    return

    def _index_of(self, kind: int) -> int:
        """Of the first ready request of this kind, or of one behind it."""
        return bisect.bisect_left(self._ready, (kind,), key=_place)

    def is_ready(self, req: Req) -> bool:
        entry = self._entries.get(req.req_id)
        return entry is not None and entry.wait is None

    def place_of(self, req: Req) -> Place:
        return self._entries[req.req_id].queue_place

    def num_passed_over(self, entry: QueuedReq) -> int:
        """How many requests were admitted before this one that came later. All count that start while it is blocked."""
        since = 0 if entry.wait is None else self.num_admitted - entry.blocked_at
        return entry.req.num_passed_over + since

    def admit(self, req: Req) -> None:
        """Remove a ready request, which passes those before it."""
        index = bisect.bisect_left(self._ready, self.place_of(req), key=_place)
        for passed in self._ready[:index]:
            passed.req.num_passed_over += 1
        self.num_admitted += 1
        self.remove(req)

    def remove(self, req: Req) -> None:
        self._leave(self._entries.pop(req.req_id))
        self.num_tokens -= len(req.prompt_ids)

    def find(self, req_id: int) -> Req | None:
        entry = self._entries.get(req_id)
        return None if entry is None else entry.req

    def find_preempted(self, req_id: int) -> Req | None:
        """A request that has run here: its tokens may still be in flight."""
        req = self.find(req_id)
        return None if req is None or not req.num_admissions else req

    def _new_place(self, req: Req) -> Place:
        if req.output_len:  # it has begun in another engine
            return self._begun_place(req)
        return BACKGROUND_NEW if req.is_background else NEW, self._policy.rank(req), next(self._count)

    def _begun_place(self, req: Req) -> Place:
        return BACKGROUND_BEGUN if req.is_background else BEGUN, req.arrived_s, next(self._count)

    def _put(self, req: Req, queue_place: Place) -> None:
        self.num_changes += 1
        self.num_tokens += len(req.prompt_ids)
        self._entries[req.req_id] = entry = QueuedReq(req, queue_place)
        bisect.insort(self._ready, entry, key=_place)

    def _leave(self, entry: QueuedReq) -> None:
        """It is in no list any more."""
        self.num_changes += 1
        entry.req.num_passed_over = self.num_passed_over(entry)
        entries = self._ready if entry.wait is None else entry.wait.blocked
        del entries[bisect.bisect_left(entries, entry.queue_place, key=_place)]
        entry.wait = None
