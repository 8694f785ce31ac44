"""Sends simulated requests to simulated servers, with the routing of the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.cluster.measured_load import MeasuredLoad, SharedRates
from lightserve.cluster.prefix_index import PrefixIndex
from lightserve.cluster.rates import OutputLength
from lightserve.cluster.routing import RoutedRequest, make_policy
from lightserve.router.req import Req
from lightserve.simulate.replica import EndedStep, Replica
from lightserve.utils.block_hash import Hashes, block_hashes


@dataclass(slots=True, eq=False)
class Sent:
    """A request that a replica has."""

    replica: int
    hashes: list[int]
    tokens_to_compute: int  # before its next token; 0: it has one from this replica
    sent_s: float


class Gateway:
    """Knows of each replica what the dispatcher would know of it. Several replicas may be down."""

    def __init__(self, policy: str) -> None:
        self._policy = make_policy(policy)
        self._index = PrefixIndex()
        self._rates = SharedRates()
        self._output_length = OutputLength()
        self._loads: dict[int, MeasuredLoad] = {}
        self._sent: dict[int, Sent] = {}  # by req_id

    def join(self, number: int, replica: Replica) -> None:
        replica.scheduler.pool.track_blocks()
        self._index.add_engine(number)
        self._loads[number] = MeasuredLoad(number, self._rates)
        self._loads = dict(sorted(self._loads.items()))

    def leave(self, number: int) -> list[int]:
        """The replica died. Returns the ids of its requests, oldest first; each must be sent to another one."""
        self._index.remove_engine(number)
        del self._loads[number]
        lost = [req_id for req_id, sent in self._sent.items() if sent.replica == number]
        for req_id in lost:
            del self._sent[req_id]
        return lost

    def choose(self, req: Req, now: float) -> int:
        """The replica that gets the request."""
        if not len(req.block_hashes):
            hashes: Hashes = block_hashes(req.prompt_ids, req.salt)
            req.block_hashes = hashes
        blocks: list[int] = req.block_hashes.tolist()
        cached = {number: self._index.cached_tokens(number, blocks) for number in self._loads}
        known = len(req.prompt_ids) + req.output_len
        expected = max(min(self._output_length.tokens, req.max_new_tokens) - req.output_len, 1.0)
        routed = RoutedRequest(known, expected, cached, first_block=blocks[0] if blocks else 0)
        number = self._policy.choose(routed, [load.load() for load in self._loads.values()])
        sent = Sent(number, blocks, max(known - cached[number], 1), now)
        self._sent[req.req_id] = sent
        self._index.presume(number, blocks)
        self._loads[number].add(sent.tokens_to_compute)
        return number

    def observe(self, number: int, replica: Replica, ended: EndedStep, now: float) -> None:
        """A step of the replica ended: what the dispatcher would see of it."""
        if (blocks := replica.scheduler.pool.blocks) is not None and (news := blocks.take_news()) is not None:
            self._index.apply(number, news)
        load = self._loads[number]
        prefilled, begun_s = 0, now
        for req in ended.others:
            sent = self._sent[req.req_id]
            if sent.tokens_to_compute:
                load.count_computed(sent.tokens_to_compute)
                prefilled, begun_s = prefilled + sent.tokens_to_compute, min(begun_s, sent.sent_s)
                sent.tokens_to_compute = 0
        num_tokens = sum(ended.gap_counts) + len(ended.others)
        if num_tokens:
            load.observe_step(num_tokens, prefilled, begun_s, now)
        for req in ended.others:
            if req.finish_reason is not None:
                self._output_length.observe(req.output_len)
                self._index.end_presumption(number, self._sent.pop(req.req_id).hashes)
                load.remove()
