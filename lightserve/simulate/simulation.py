"""A load on simulated servers, on a virtual clock that steps and arrivals advance.

Several servers have a gateway before them. Some may die and come back.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from lightserve.router.req import Req
from lightserve.simulate.client import Client, NewRequest
from lightserve.simulate.gateway import Gateway
from lightserve.simulate.load import Load
from lightserve.simulate.replica import Replica, Setup
from lightserve.simulate.result import Result


class Failure(NamedTuple):
    """A replica dies, and another one takes its place later, with nothing in its cache."""

    at_s: float
    replica: int
    down_s: float


class Simulation:
    """``policy``: of the gateway; None: there is one server, and no gateway."""

    def __init__(
        self,
        setup: Setup,
        load: Load,
        replicas: int = 1,
        policy: str | None = None,
        failures: Sequence[Failure] = (),
    ) -> None:
        if policy is None and (replicas > 1 or failures):
            raise ValueError("several servers, or servers that die, need a gateway with a policy")
        self.result = Result()
        self._setup = setup
        self._client = Client(load, self.result)
        self._gateway = None if policy is None else Gateway(policy)
        self.replicas: dict[int, Replica] = {}  # those that serve
        self._dead: list[Replica] = []
        self._reqs: dict[int, tuple[Req, int]] = {}  # that have not ended, and their output lengths
        self._waiting: list[int] = []  # requests that no replica can take now
        self._due: list[tuple[float, int]] = []  # a heap; an entry is void if its replica has another time now
        self._changes = list(failures)  # a heap; those with a down_s of 0 are starts
        heapq.heapify(self._changes)
        for number in range(replicas):
            self._start(number)

    def run(self) -> Result:
        begin = time.thread_time()
        last_s = 0.0
        while (now := min(self._client.next_s, self._next_due_s(), self._next_change_s())) < math.inf:
            touched = set()
            while self._changes and self._changes[0][0] <= now:
                touched |= self._change(*heapq.heappop(self._changes))
            while self._next_due_s() <= now:
                number = heapq.heappop(self._due)[1]
                touched |= self._end_step(number, now)
                last_s = now
            touched |= self._send(self._client.arrived(now), now)
            for number in sorted(touched):
                self._run(number, now)
        if self._reqs:
            raise RuntimeError(f"{len(self._reqs)} requests have not ended, and nothing will happen")
        self._sum_up(last_s, time.thread_time() - begin)
        return self.result

    def _sum_up(self, seconds: float, cpu_s: float) -> None:
        result, replicas = self.result, [*self._dead, *self.replicas.values()]
        result.seconds, result.cpu_s = seconds, cpu_s
        result.steps = sum(replica.steps for replica in replicas)
        result.preemptions = sum(replica.scheduler.num_preemptions for replica in replicas)
        result.peak_used = max(replica.peak_used for replica in replicas)

    def _next_due_s(self) -> float:
        while self._due:
            due_s, number = self._due[0]
            replica = self.replicas.get(number)
            if replica is not None and replica.due_s == due_s:
                return due_s
            heapq.heappop(self._due)
        return math.inf

    def _next_change_s(self) -> float:
        return self._changes[0][0] if self._changes else math.inf

    def _run(self, number: int, now: float) -> None:
        replica = self.replicas.get(number)
        if replica is None:
            return
        replica.run(now)
        if replica.due_s < math.inf:
            heapq.heappush(self._due, (replica.due_s, number))

    def _end_step(self, number: int, now: float) -> set[int]:
        """Returns the replicas that have something to plan."""
        replica = self.replicas[number]
        ended = replica.end_step(now)
        if ended is None:
            return {number}
        if self._gateway is not None:
            self._gateway.observe(number, replica, ended, now)
        finished = self._client.record(ended, now)
        for req in finished:
            del self._reqs[req.req_id]
        return {number} | self._send(self._client.follow_up(finished, now), now)

    def _send(self, requests: Sequence[NewRequest], now: float) -> set[int]:
        for req, output_len in requests:
            self._reqs[req.req_id] = req, output_len
        return {number for req, _ in requests for number in self._place(req.req_id, now)}

    def _place(self, req_id: int, now: float) -> set[int]:
        if not self.replicas:
            self._waiting.append(req_id)
            return set()
        req, output_len = self._reqs[req_id]
        number = 0 if self._gateway is None else self._gateway.choose(req, now)
        self.replicas[number].add(req, output_len - req.output_len, now)
        return {number}

    def _change(self, now: float, number: int, down_s: float) -> set[int]:
        """A replica dies, or starts if ``down_s`` is 0. Returns the replicas that have something to plan."""
        if not down_s:
            self._start(number)
            waiting, self._waiting = self._waiting, []
            return {chosen for req_id in waiting for chosen in self._place(req_id, now)}
        if number not in self.replicas:
            return set()
        self.replicas[number].settle(now)
        self._dead.append(self.replicas.pop(number))
        heapq.heappush(self._changes, Failure(now + down_s, number, 0.0))
        lost = [] if self._gateway is None else self._gateway.leave(number)
        for req_id in lost:
            req, output_len = self._reqs[req_id]
            self._reqs[req_id] = _continued(req), output_len
        return {chosen for req_id in lost for chosen in self._place(req_id, now)}

    def _start(self, number: int) -> None:
        replica = self.replicas[number] = Replica(self._setup)
        if self._gateway is not None:
            self._gateway.join(number, replica)


def _continued(req: Req) -> Req:
    """The request as another replica gets it: with its tokens, and without KV."""
    moved = Req(
        req.req_id, req.prompt_ids, req.params, req.max_new_tokens, req.eos_ids, req.arrived_s, req.priority,
        salt=req.salt, block_hashes=req.block_hashes,
    )  # fmt: skip
    if req.output_len:
        moved.continue_from(req.output_ids, req.last_token_s)
        moved.first_token_s = req.first_token_s
    moved.cached_len = req.cached_len
    return moved


def simulate(
    setup: Setup, load: Load, replicas: int = 1, policy: str | None = None, failures: Sequence[Failure] = ()
) -> Result:
    return Simulation(setup, load, replicas, policy, failures).run()
