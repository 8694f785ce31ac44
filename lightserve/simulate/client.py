"""The clients of a load: what they send, and what becomes of it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from lightserve.messages.params import GenerationParams
from lightserve.router.req import Req
from lightserve.simulate.frontend_latency import NO_FRONTEND, FrontendLatency, HttpProcesses
from lightserve.simulate.gpu import EOS
from lightserve.simulate.load import URGENT, Load
from lightserve.simulate.replica import EndedStep
from lightserve.simulate.result import Result

NewRequest = tuple[Req, int]  # with the tokens that the model will generate


class Client:
    """Sends the requests of a load, and records what becomes of them."""

    def __init__(self, load: Load, result: Result, frontend: FrontendLatency = NO_FRONTEND) -> None:
        self._result = result
        self._requests = load.requests()
        self._arrivals = load.arrivals()
        self._next_sent_s = next(self._arrivals, math.inf)  # of a request that does not depend on an answer
        self._http = HttpProcesses(frontend)
        self._to_client_s = frontend.to_client_s
        self._on_way: list[tuple[float, int, NewRequest]] = []  # a heap: when it arrives, its id
        self._is_closed = load.rate is None  # a client sends its next request when the last one ends
        self._ends_by_length = load.ends_by_length
        self._ids = itertools.count()
        self._params = GenerationParams.of(max_new_tokens=load.max_new_tokens, seed=0)

    @property
    def next_s(self) -> float:
        """When the next request arrives, or is sent."""
        return min(self._next_sent_s, self._on_way[0][0]) if self._on_way else self._next_sent_s

    def arrived(self, now: float) -> list[NewRequest]:
        """The requests that have arrived since the last call."""
        while self._next_sent_s <= now:
            self._send(self._next_sent_s)
            self._next_sent_s = next(self._arrivals, math.inf)
        requests = []
        while self._on_way and self._on_way[0][0] <= now:
            requests.append(heapq.heappop(self._on_way)[2])
        return requests

    def record(self, ended: EndedStep, now: float) -> list[Req]:
        """Returns the requests that are finished."""
        result = self._result
        result.gaps.extend(ended.gaps)
        result.gap_counts.extend(ended.gap_counts)
        for req in ended.others:
            if req.first_token_s:
                result.gaps.append(now - req.last_token_s)
                result.gap_counts.append(1)
            else:
                req.first_token_s = now
            req.last_token_s = now
        finished = [req for req in ended.others if req.finish_reason is not None]
        for req in finished:
            result.requests += 1
            result.output_tokens += req.output_len
            result.prompt_tokens += len(req.prompt_ids)
            result.cached_tokens += req.cached_len
            ttft = req.first_token_s - req.arrived_s + self._to_client_s
            (result.urgent_ttft if req.priority == URGENT else result.ttft).append(ttft)
        return finished

    def record_gap(self, seconds: float, num_requests: int) -> None:
        """So many requests got a token, and go on."""
        self._result.gaps.append(seconds)
        self._result.gap_counts.append(num_requests)

    def follow_up(self, finished: Sequence[Req], now: float) -> None:
        """The streams of these requests send their next ones, as soon as they have the ends of the last."""
        if self._is_closed:
            for _ in finished:
                self._send(now + self._to_client_s)

    def _send(self, sent_s: float) -> None:
        request = next(self._requests, None)
        if request is None:
            return
        most = request.output_len if self._ends_by_length else self._params.stopping.max_new_tokens
        req_id, ids = next(self._ids), request.prompt_ids
        req = Req(req_id, ids, self._params, most, (EOS,), sent_s, request.priority)
        heapq.heappush(self._on_way, (self._http.arrival_s(sent_s, len(ids)), req_id, (req, request.output_len)))
