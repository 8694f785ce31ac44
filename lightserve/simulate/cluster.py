"""Several simulated servers behind one gateway, some of which may die and come back."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from lightserve.router.req import Req
from lightserve.simulate.gateway import Gateway
from lightserve.simulate.load import Load
from lightserve.simulate.replica import Replica, Setup
from lightserve.simulate.result import Result
from lightserve.simulate.simulation import Client


class Failure(NamedTuple):
    """A replica dies, and another one takes its place later, with nothing in its cache."""

    at_s: float
    replica: int
    down_s: float


class ClusterSimulation:
    """The same requests and results as a Simulation, with ``replicas`` servers."""

    def __init__(
        self, setup: Setup, load: Load, replicas: int, policy: str = "prefix", failures: Sequence[Failure] = ()
    ) -> None:
        self.result = Result()
        self._setup = setup
        self._client = Client(load, self.result)
        self._gateway = Gateway(policy)
        self._replicas: dict[int, Replica] = {}  # those that serve
        self._dead: list[Replica] = []
        self._reqs: dict[int, tuple[Req, int]] = {}  # that have not ended, and their output lengths
        self._waiting: list[int] = []  # requests that no replica can take now
        self._due: list[tuple[float, int]] = []  # a heap; an entry is void if its replica has another time now
        self._changes: list[tuple[float, int, float]] = [(one.at_s, one.replica, one.down_s) for one in failures]
        heapq.heapify(self._changes)
        for number in range(replicas):
            self._start(number, 0.0)

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
        result, replicas = self.result, [*self._dead, *self._replicas.values()]
        result.seconds, result.cpu_s = seconds, cpu_s
        result.steps = sum(replica.steps for replica in replicas)
        result.preemptions = sum(replica.scheduler.num_preemptions for replica in replicas)
        result.peak_used = max(replica.peak_used for replica in replicas)

    def _next_due_s(self) -> float:
        while self._due:
            due_s, number = self._due[0]
            replica = self._replicas.get(number)
            if replica is not None and replica.due_s == due_s:
                return due_s
            heapq.heappop(self._due)
        return math.inf

    def _next_change_s(self) -> float:
        return self._changes[0][0] if self._changes else math.inf

    def _run(self, number: int, now: float) -> None:
        replica = self._replicas.get(number)
        if replica is None:
            return
        replica.run(now)
        if replica.due_s < math.inf:
            heapq.heappush(self._due, (replica.due_s, number))

    def _end_step(self, number: int, now: float) -> set[int]:
        """Returns the replicas that have something to plan."""
        replica = self._replicas[number]
        ended = replica.end_step(now)
        if ended is None:
            return {number}
        self._gateway.observe(number, replica, ended, now)
        finished = self._client.record(ended, now)
        for req in finished:
            del self._reqs[req.req_id]
        return {number} | self._send(self._client.follow_up(finished, now), now)

    def _send(self, requests: Sequence[tuple[Req, int]], now: float) -> set[int]:
        for req, output_len in requests:
            self._reqs[req.req_id] = req, output_len
        return {number for req, _ in requests for number in self._place(req.req_id, now)}

    def _place(self, req_id: int, now: float) -> set[int]:
        if not self._gateway.has_replicas:
            self._waiting.append(req_id)
            return set()
        req, output_len = self._reqs[req_id]
        number = self._gateway.choose(req, now)
        self._replicas[number].add(req, output_len - req.output_len)
        return {number}

    def _change(self, now: float, number: int, down_s: float) -> set[int]:
        """A replica dies, or starts if ``down_s`` is 0. Returns the replicas that have something to plan."""
        if not down_s:
            self._start(number, now)
            waiting, self._waiting = self._waiting, []
            return {chosen for req_id in waiting for chosen in self._place(req_id, now)}
        if number not in self._replicas:
            return set()
        self._dead.append(self._replicas.pop(number))
        heapq.heappush(self._changes, (now + down_s, number, 0.0))
        lost = self._gateway.leave(number)
        for req_id in lost:
            req, output_len = self._reqs[req_id]
            self._reqs[req_id] = _continued(req), output_len
        return {chosen for req_id in lost for chosen in self._place(req_id, now)}

    def _start(self, number: int, now: float) -> None:
        replica = self._replicas[number] = Replica(self._setup)
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


def simulate_cluster(
    setup: Setup, load: Load, replicas: int, policy: str = "prefix", failures: Sequence[Failure] = ()
) -> Result:
    return ClusterSimulation(setup, load, replicas, policy, failures).run()
