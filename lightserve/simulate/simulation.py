"""A load on simulated servers, on a virtual clock that steps and arrivals advance.

Several servers have a gateway before them. Some may die and come back.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvCancel, KvTarget, KvTransferTimeout, RemotePrefillRequest
from lightserve.messages.params import GenerationParams
from lightserve.messages.worker_calls import KvReceived
from lightserve.router.req import Req
from lightserve.simulate.client import Client, NewRequest
from lightserve.simulate.gateway import Gateway
from lightserve.simulate.kv_tiers import StoreBlocks
from lightserve.simulate.kv_transfer import KvTransfers, Split, Transfer
from lightserve.simulate.load import Load
from lightserve.simulate.replica import Replica, Setup
from lightserve.simulate.result import Result

JOB = GenerationParams.of(max_new_tokens=1, temperature=0.0, seed=0)  # of a prompt that is computed for another server


class Failure(NamedTuple):
    """A replica dies, and another one takes its place later, with nothing in its cache."""

    at_s: float
    replica: int
    down_s: float


class Simulation:
    """``policy``: of the gateway; None: there is one server, and no gateway. ``split``: roles of the replicas."""

    def __init__(
        self,
        setup: Setup,
        load: Load,
        replicas: int = 1,
        policy: str | None = None,
        failures: Sequence[Failure] = (),
        split: Split | None = None,
    ) -> None:
        if policy is None and (replicas > 1 or failures):
            raise ValueError("several servers, or servers that die, need a gateway with a policy")
        if split is not None and len(split.roles) != replicas:
            raise ValueError(f"{len(split.roles)} roles for {replicas} replicas")
        self.result = Result()
        self._setup = setup
        self._client = Client(load, self.result, setup.frontend)
        split = split or Split(("normal",) * replicas)
        self._roles = split.roles
        self._transfers = KvTransfers(split, setup.cost.kv_bytes)
        self._gateway = None if policy is None else Gateway(policy, split.min_tokens)
        self.replicas: dict[int, Replica] = {}  # those that serve
        self._dead: list[Replica] = []
        self._shared_stores: dict[str, StoreBlocks] = {}
        self._reqs: dict[int, tuple[Req, int]] = {}  # that have not ended, and their output lengths
        self._waiting: list[int] = []  # requests that no replica can take now
        self._due: list[tuple[float, int]] = []  # a heap; an entry is void if its replica has another time now
        self._changes = list(failures)  # a heap; those with a down_s of 0 are starts
        heapq.heapify(self._changes)
        for number in range(replicas):
            self._start(number)

    def run(self) -> Result:
        begin = time.thread_time()
        while (now := self._next_s()) < math.inf:
            self._catch_up(now)
            touched = set()
            while self._changes and self._changes[0][0] <= now:
                touched |= self._change(*heapq.heappop(self._changes))
            touched |= {
                self._receive(transfer_id, transfer, now) for transfer_id, transfer in self._transfers.arrived(now)
            }
            while self._next_due_s() <= now:
                number = heapq.heappop(self._due)[1]
                touched |= self._end_step(number, now)
            touched |= self._send(self._client.arrived(now), now)
            for number in sorted(touched):
                self._run(number, now)
        if self._reqs:
            raise RuntimeError(f"{len(self._reqs)} requests have not ended, and nothing will happen")
        self._sum_up(time.thread_time() - begin)
        return self.result

    def _sum_up(self, cpu_s: float) -> None:
        result, replicas = self.result, [*self._dead, *self.replicas.values()]
        result.cpu_s = cpu_s
        result.steps = sum(replica.steps for replica in replicas)
        result.preemptions = sum(replica.scheduler.num_preemptions for replica in replicas)
        result.peak_used = max(replica.peak_used for replica in replicas)
        result.moved_tokens = self._transfers.num_sent
        for tiers in (replica.tiers for replica in replicas):
            for name, figures in ({} if tiers is None else tiers.metrics()).items():
                result.tier_hits[name] += int(figures["hits_total"])
                result.tier_recomputed[name] += int(figures["recomputed_tokens_total"])

    def _next_s(self) -> float:
        return min(self._client.next_s, self._next_due_s(), self._next_change_s(), self._transfers.next_s)

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

    def _catch_up(self, now: float) -> None:
        """See the steps that only decoded and ended before now, in their order."""
        ended = []
        for number, replica in self.replicas.items():
            ended += [(step.end_s, number, step) for step in replica.decoded(now)]
            if replica.ends_step(now):
                heapq.heappush(self._due, (now, number))
                replica.due_s = now
        for end_s, number, step in sorted(ended):
            self.result.seconds = end_s
            self._client.record_gap(step.gap_s, step.num_requests)
            if self._gateway is not None:
                self._gateway.observe_decode(number, step.num_requests, end_s)

    def _run(self, number: int, now: float) -> None:
        replica = self.replicas.get(number)
        if replica is None:
            return
        replica.run(now)
        self._push_due(number)
        if replica.messages:
            self._handle_messages(number, replica, now)

    def _push_due(self, number: int) -> None:
        if self.replicas[number].due_s < math.inf:
            heapq.heappush(self._due, (self.replicas[number].due_s, number))

    def _end_step(self, number: int, now: float) -> set[int]:
        """Returns the replicas that have something to plan."""
        replica = self.replicas[number]
        ended = replica.end_step(now)
        if ended is None:
            return {number}
        if ended.gaps or ended.others:
            self.result.seconds = now
        if self._gateway is not None:
            self._gateway.observe(number, ended, now)
        if replica.role in ("prefill", "both"):
            self._transfers.send(ended.sends, number, now)
            ended = ended._replace(others=[req for req in ended.others if req.target is None])
        finished = self._client.record(ended, now)
        for req in finished:
            del self._reqs[req.req_id]
        self._client.follow_up(finished, now)
        return {number}

    def _send(self, requests: Sequence[NewRequest], now: float) -> set[int]:
        for req, output_len in requests:
            self._reqs[req.req_id] = req, output_len
        return {number for req, _ in requests for number in self._place(req.req_id, now)}

    def _place(self, req_id: int, now: float) -> set[int]:
        if not self.replicas:
            self._waiting.append(req_id)
            return set()
        req, output_len = self._reqs[req_id]
        number, transfer_params = (0, None) if self._gateway is None else self._gateway.choose(req, now)
        self.replicas[number].add(req, output_len - req.output_len, now, transfer_params)
        return {number}

    def _handle_messages(self, number: int, replica: Replica, now: float) -> None:
        """A decode server has slots for prompts."""
        messages, replica.messages[:] = replica.messages[:], []
        prefills = {
            self._start_job(number, message, now) for message in messages if isinstance(message, RemotePrefillRequest)
        }
        self._transfers.expect(replica.recvs, now)
        replica.recvs.clear()
        for prefill in sorted(prefills - {number}):
            self._run(prefill, now)

    def _start_job(self, decode: int, wanted: RemotePrefillRequest, now: float) -> int:
        """Returns the server that computes the prompt."""
        if self._gateway is None:
            return decode
        if not wanted.num_blocks:
            self._gateway.compute_itself(decode, wanted.req_id, now, is_measured=True)
            return decode
        req, _ = self._reqs[wanted.req_id]
        choice = self._gateway.choose_prefill(req, decode, wanted.first_block * BLOCK_TOKENS, now)
        if choice is None:
            self._transfers.open(wanted, decode, decode)
            self._cancel_transfer(wanted.transfer_id, wanted.req_id, decode, now, was_started=False)
            self._gateway.compute_itself(decode, wanted.req_id, now, is_measured=True)
            return decode
        prefill, _ = choice
        self._transfers.open(wanted, decode, prefill)
        job = _job(req, wanted, now)
        self._gateway.add_job(prefill, job, now)
        self.replicas[prefill].add_job(job, KvTarget(wanted.transfer_id, wanted.first_block, []), now)
        return prefill

    def _cancel_transfer(self, transfer_id: int, req_id: int, decode: int, now: float, *, was_started: bool) -> None:
        """Nobody computes the prompt. The decode server goes on with what has come."""
        self.replicas[decode].cancel_transfer(KvCancel(req_id, transfer_id, was_started), now)
        self._push_due(decode)
        self._transfers.end(transfer_id, now)

    def _receive(self, transfer_id: int, transfer: Transfer, now: float) -> int:
        """A transfer has ended. Returns the server that waited for it."""
        replica = self.replicas[transfer.decode]
        replica.receive(KvReceived(transfer_id, transfer.arrived), now)
        missing = KvTransferTimeout(transfer.req_id, transfer_id)
        if self._gateway is not None and missing in replica.messages:
            replica.messages.remove(missing)
            self._gateway.keep_apart(transfer.decode, transfer.prefill, now)
            self._gateway.compute_itself(transfer.decode, transfer.req_id, now, is_measured=False)
        return transfer.decode

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
        lost = [] if self._gateway is None else self._leave(self._gateway, number, now)
        for req_id in lost:
            req, output_len = self._reqs[req_id]
            self._reqs[req_id] = _continued(req), output_len
        return {chosen for req_id in lost for chosen in self._place(req_id, now)}

    def _leave(self, gateway: Gateway, number: int, now: float) -> list[int]:
        """Returns the requests that the dead replica had. Nobody computes prompts for it any more."""
        for transfer_id, transfer in self._transfers.lose(number):
            self._cancel_transfer(transfer_id, transfer.req_id, transfer.decode, now, was_started=True)
            gateway.compute_itself(transfer.decode, transfer.req_id, now, is_measured=False)
        lost = gateway.leave(number)
        for req_id in lost:
            prefill = gateway.remove_job(req_id)
            if prefill is not None:
                self.replicas[prefill].abort(req_id, now)
                self._push_due(prefill)
        return lost

    def _start(self, number: int) -> None:
        replica = self.replicas[number] = Replica(self._setup, self._roles[number], self._shared_stores)
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


def _job(req: Req, wanted: RemotePrefillRequest, now: float) -> Req:
    """The prompt as a prefill server gets it: whole blocks only."""
    end = wanted.first_block + wanted.num_blocks
    ids, hashes = req.token_ids[: end * BLOCK_TOKENS], req.block_hashes[:end]
    return Req(req.req_id, ids, JOB, 1, (), now, req.priority, salt=req.salt, block_hashes=hashes)


def simulate(
    setup: Setup,
    load: Load,
    replicas: int = 1,
    policy: str | None = None,
    failures: Sequence[Failure] = (),
    split: Split | None = None,
) -> Result:
    return Simulation(setup, load, replicas, policy, failures, split).run()
