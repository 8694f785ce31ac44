"""Sends simulated requests to simulated servers, with the routing of the dispatcher."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightserve.cluster.disaggregation import (
    APART_S,
    choose_prefill,
    for_generation,
    for_prefill,
    rest_tokens,
    should_prefill_locally,
    timeout_s,
)
from lightserve.cluster.load_estimate import Assignment, MeasuredLoad, SharedRates
from lightserve.cluster.prefix_index import PrefixIndex
from lightserve.cluster.rates import OutputLength
from lightserve.cluster.routing import RoutedRequest, make_policy
from lightserve.messages.block_hash import Hashes, block_hashes
from lightserve.messages.cluster import KvTransferParams
from lightserve.router.kv.cached_blocks import CachedBlocks
from lightserve.router.req import Req
from lightserve.simulate.replica import EndedStep, Replica


@dataclass(slots=True, eq=False)
class Dispatch:
    """A request that a replica has, or a prompt that it computes for another one."""

    hashes: list[int]
    assignment: Assignment


@dataclass(slots=True, eq=False)
class Server:
    number: int
    role: str
    load: MeasuredLoad
    cached: CachedBlocks


class Gateway:
    """Knows of each replica what the dispatcher would know of it. Several replicas may be down."""

    def __init__(self, policy: str, min_remote_prefill_tokens: int = 1) -> None:
        self._policy = make_policy(policy)
        self._min_remote_prefill_tokens = min_remote_prefill_tokens
        self._index = PrefixIndex()
        self._rates = SharedRates()
        self._output_length = OutputLength()
        self._servers: dict[int, Server] = {}
        self._dispatches: dict[tuple[int, int], Dispatch] = {}  # by replica and req_id
        self._transfer_ids = itertools.count()
        self._job_at: dict[int, int] = {}  # by req_id: the replica that computes its prompt for another one
        self._apart_until_s: dict[tuple[int, int], float] = {}  # by decode and prefill server

    def join(self, number: int, replica: Replica) -> None:
        blocks = CachedBlocks([replica.scheduler.only_group.pool])
        self._index.add_engine(number)
        self._apart_until_s = {pair: until for pair, until in self._apart_until_s.items() if number not in pair}
        self._servers[number] = Server(number, replica.role, MeasuredLoad(number, self._rates), blocks)
        self._servers = dict(sorted(self._servers.items()))

    def leave(self, number: int) -> list[int]:
        """The replica died. Returns the ids of its requests, oldest first; each must be sent to another one."""
        self._index.remove_engine(number)
        del self._servers[number]
        held = [req_id for replica, req_id in self._dispatches if replica == number]
        for req_id in held:
            del self._dispatches[number, req_id]
        jobs = [req_id for req_id in held if self._job_at.get(req_id) == number]
        for req_id in jobs:
            del self._job_at[req_id]
        return [req_id for req_id in held if req_id not in jobs]

    def choose(self, req: Req, now: float) -> tuple[int, KvTransferParams | None]:
        """The replica that gets the request, and a transfer if a prefill server should compute its prompt."""
        if not len(req.block_hashes):
            hashes: Hashes = block_hashes(req.prompt_ids, req.salt)
            req.block_hashes = hashes
        servers = for_generation(list(self._servers.values()))
        routed = self._routed(req, servers)
        number = self._policy.choose(routed, [server.load.load() for server in servers])
        cached = routed.cached_tokens[number]
        transfer_params = self._transfer_params(req, number, cached, now)
        self._add(number, req, cached, now, waits_for_kv=transfer_params is not None)
        return number, transfer_params

    def choose_prefill(self, req: Req, decode: int, cached: int, now: float) -> tuple[int, float] | None:
        """The server that should compute the prompt for ``decode``, and how long that may take; None: itself."""
        if self._servers[decode].role != "decode":
            return None
        servers = [
            server
            for server in for_prefill(list(self._servers.values()))
            if server.number != decode and self._apart_until_s.get((decode, server.number), now) <= now
        ]
        routed = self._routed(req, servers)
        routed.cached_tokens[decode] = cached
        routed.expected_output = 0.0
        load = self._servers[decode].load.load()
        best = choose_prefill(routed, load, [server.load.load() for server in servers], self._min_remote_prefill_tokens)
        if best is None or should_prefill_locally(routed, load, best):
            return None
        return best.engine, timeout_s(routed, best)

    def compute_itself(self, decode: int, req_id: int, now: float, is_measured: bool) -> None:
        """No prefill server computes the prompt, or not all of it. ``is_measured``: none of its KV has come."""
        self._servers[decode].load.compute_itself(self._dispatches[decode, req_id].assignment, now, is_measured)

    def keep_apart(self, decode: int, prefill: int, now: float) -> None:
        self._apart_until_s[decode, prefill] = now + APART_S

    def add_job(self, number: int, job: Req, now: float) -> None:
        """A replica computes this prompt for another one."""
        self._job_at[job.req_id] = number
        self._add(number, job, self._index.cached_tokens(number, job.block_hashes.tolist()), now)

    def remove_job(self, req_id: int) -> int | None:
        """Nobody needs the prompt of this request any more. Returns the replica that computes it; None: none does."""
        number = self._job_at.pop(req_id, None)
        if number is not None:
            self._end(number, req_id)
        return number

    def observe(self, number: int, ended: EndedStep, now: float) -> None:
        """A step of the replica ended: what the dispatcher would see of it."""
        self._take_events(number)
        num_requests = sum(ended.gap_counts) + len(ended.others)
        if num_requests:
            assignments = [self._dispatches[number, req.req_id].assignment for req in ended.others]
            self._servers[number].load.observe_step(num_requests, assignments, now, ended.num_tokens)
        for req in ended.others:
            if req.finish_reason is not None:
                if req.target is None:
                    self._output_length.observe(req.output_len)
                else:
                    del self._job_at[req.req_id]
                self._end(number, req.req_id)

    def observe_decode(self, number: int, num_requests: int, now: float) -> None:
        """``observe`` of a step that gave each of so many requests a token, and ended none."""
        self._take_events(number)
        self._servers[number].load.observe_step(num_requests, (), now)

    def _take_events(self, number: int) -> None:
        if (events := self._servers[number].cached.take_events()) is not None:
            self._index.apply(number, events)

    def _routed(self, req: Req, servers: Sequence[Server]) -> RoutedRequest:
        blocks: list[int] = req.block_hashes.tolist()
        cached = {server.number: self._index.cached_tokens(server.number, blocks) for server in servers}
        known = len(req.prompt_ids) + req.output_len
        expected = max(min(self._output_length.tokens, req.max_new_tokens) - req.output_len, 1.0)
        return RoutedRequest(known, expected, cached, first_block=blocks[0] if blocks else 0)

    def _transfer_params(self, req: Req, decode: int, cached: int, now: float) -> KvTransferParams | None:
        choice = self.choose_prefill(req, decode, cached, now)
        if choice is None:
            return None
        return KvTransferParams(next(self._transfer_ids), choice[1], self._min_remote_prefill_tokens)

    def _add(self, number: int, req: Req, cached: int, now: float, waits_for_kv: bool = False) -> None:
        blocks: list[int] = req.block_hashes.tolist()
        known, load = len(req.prompt_ids) + req.output_len, self._servers[number].load
        missing = max(known - cached, 1)
        if waits_for_kv:
            assignment = load.add_waiting_for_kv(missing, rest_tokens(known), now)
        else:
            assignment = load.add(missing, now)
        self._dispatches[number, req.req_id] = Dispatch(blocks, assignment)
        self._index.presume(number, blocks)

    def _end(self, number: int, req_id: int) -> None:
        sent = self._dispatches.pop((number, req_id))
        self._index.end_presumption(number, sent.hashes)
        self._servers[number].load.remove(sent.assignment)
