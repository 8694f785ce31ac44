"""An engine as the dispatcher sees it: its link, its requests, its load and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightserve.cluster.disaggregation import SAME_SERVER, KvExchange, rest_tokens
from lightserve.cluster.inflight_request import InflightRequest
from lightserve.cluster.link import EngineLink
from lightserve.cluster.load_estimate import MeasuredLoad, SharedRates
from lightserve.cluster.routing import EngineLoad
from lightserve.messages.output import RouterStats, TokenIdOut


class Engine:
    def __init__(
        self,
        number: int,
        link: EngineLink,
        rates: SharedRates,
        role: str = "normal",
        kv_exchange: KvExchange = SAME_SERVER,
    ) -> None:
        self.number = number
        self.link = link
        self.role = role
        self.kv_exchange = kv_exchange
        self.requests: dict[int, InflightRequest] = {}
        self.stats: RouterStats | None = None
        self.has_workers = True
        self.weights_problem = ""  # why it may not generate: it has other weights than the other engines
        self.is_updating = False  # a trainer replaces its weights, or those of another engine
        self.silent_ticks = 0  # checks since its last message
        self.is_silent = False  # it has sent nothing for too long
        self.is_draining = False  # it gets no new requests
        self.presumed_adapters: set[str] = set()  # of requests that it got since its last stats
        self._load = MeasuredLoad(number, rates)

    @property
    def is_serving(self) -> bool:
        return self.has_workers and not self.is_silent and not self.weights_problem

    @property
    def takes_requests(self) -> bool:
        return self.is_serving and not self.is_draining

    @property
    def load(self) -> EngineLoad:
        return self._load.load()

    def add(self, req: InflightRequest, cached_tokens: int) -> None:
        """Send a request to this engine. If it has KvTransferParams, a prefill engine computes its prompt."""
        req.cached_tokens = cached_tokens
        missing, now_s = max(req.known_tokens - cached_tokens, 1), time.monotonic()
        if req.kv_transfer_params is None:
            req.assignment = self._load.add(missing, now_s)
        else:
            req.assignment = self._load.add_waiting_for_kv(missing, rest_tokens(req.known_tokens), now_s)
        self.requests[req.req_id] = req
        self.presumed_adapters.add(req.adapter)
        self.link.send(req.message())

    @property
    def adapter_digests(self) -> dict[str, str]:
        """Of the adapters in its host memory, by name."""
        return {} if self.stats is None else self.stats.adapters

    def holds(self, adapter: str) -> bool:
        """Whether it has this adapter in host memory, or will soon."""
        return adapter in self.presumed_adapters or adapter in self.adapter_digests

    @property
    def is_sleeping(self) -> bool:
        return self.stats is not None and self.stats.is_sleeping

    @property
    def problem(self) -> str:
        """Why it cannot generate until a trainer or an operator does something."""
        return self.weights_problem or ("" if self.stats is None else self.stats.problem)

    def compute_itself(self, req: InflightRequest, is_measured: bool) -> None:
        """No prefill engine computes the prompt, or not all of it. ``is_measured``: none of its KV has come."""
        self._load.compute_itself(req.assignment, time.monotonic(), is_measured)

    def remove(self, req: InflightRequest) -> None:
        """The request has ended or leaves this engine."""
        del self.requests[req.req_id]
        self._load.remove(req.assignment)

    def observe_results(self, req_ids: Sequence[int], now_s: float) -> None:
        """A step has computed the results of these pooling requests: measure how long their texts took."""
        self._load.observe_step(len(req_ids), [self.requests[req_id].assignment for req_id in req_ids], now_s)

    def add_tokens(self, outs: Sequence[TokenIdOut], now_s: float) -> None:
        """Give the tokens of a step to their requests, and measure how long they took."""
        reqs = {out.req_id: self.requests[out.req_id] for out in outs}
        for out in outs:
            reqs[out.req_id].add_token(out.token.id)
        self._load.observe_step(len(reqs), [req.assignment for req in reqs.values()], now_s, len(outs))
