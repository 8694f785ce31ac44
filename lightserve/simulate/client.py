"""The clients of a load: what they send, and what becomes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lightserve.io_struct import GenerationParams
from lightserve.router.req import Req
from lightserve.simulate.gpu import EOS
from lightserve.simulate.load import URGENT, Load
from lightserve.simulate.replica import EndedStep
from lightserve.simulate.result import Result

NewRequest = tuple[Req, int]  # with the tokens that the model will generate


class Client:
    """Sends the requests of a load, and records what becomes of them."""

    def __init__(self, load: Load, result: Result) -> None:
        self._result = result
        self._requests = load.requests()
        self._arrivals = load.arrivals()
        self.next_s = next(self._arrivals, math.inf)  # of the next arrival that does not depend on an answer
        self._is_closed = load.rate is None  # a client sends its next request when the last one ends
        self._ends_by_length = load.ends_by_length
        self._ids = itertools.count()
        self._params = GenerationParams.of(max_new_tokens=load.max_new_tokens, seed=0)

    def arrived(self, now: float) -> list[NewRequest]:
        """The requests that have arrived since the last call."""
        requests: list[NewRequest] = []
        while self.next_s <= now:
            requests += self._next(self.next_s)
            self.next_s = next(self._arrivals, math.inf)
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
            ttft = req.first_token_s - req.arrived_s
            (result.urgent_ttft if req.priority == URGENT else result.ttft).append(ttft)
        return finished

    def follow_up(self, finished: Sequence[Req], now: float) -> list[NewRequest]:
        """What the streams of these requests send next."""
        return [request for _ in finished for request in self._next(now)] if self._is_closed else []

    def _next(self, now: float) -> list[NewRequest]:
        request = next(self._requests, None)
        if request is None:
            return []
        most = request.output_len if self._ends_by_length else self._params.stopping.max_new_tokens
        req = Req(next(self._ids), request.prompt_ids, self._params, most, (EOS,), now, request.priority)
        return [(req, request.output_len)]
