"""An engine as the dispatcher sees it: its link, its requests, its load and how fast it is."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightserve.cluster.link import EngineLink
from lightserve.cluster.open_request import OpenRequest
from lightserve.cluster.rates import PrefillRate, TokenSlowdown
from lightserve.cluster.routing import EngineLoad
from lightserve.io_struct import RouterStats, TokenIdOut


class SharedRates:
    """Measured over all engines: for an engine that has not been measured, and where differences do not matter."""

    def __init__(self) -> None:
        self.prefill = PrefillRate()
        self.slowdown = TokenSlowdown()


class Engine:
    def __init__(self, number: int, link: EngineLink, rates: SharedRates) -> None:
        self.number = number
        self.link = link
        self.requests: dict[int, OpenRequest] = {}
        self.stats: RouterStats | None = None
        self.has_workers = True
        self.silent_ticks = 0  # checks since its last message
        self.is_silent = False  # it has sent nothing for too long
        self._rates = rates
        self._prefill = PrefillRate()
        self._waiting_tokens = 0
        self._num_waiting = 0  # requests without a token from this engine
        self._last_prefill_s = 0.0
        self._last_tokens_s: float | None = None  # None: it was idle

    @property
    def is_serving(self) -> bool:
        return self.has_workers and not self.is_silent

    @property
    def load(self) -> EngineLoad:
        prefill = self._prefill if self._prefill.is_measured else self._rates.prefill
        return EngineLoad(
            self.number,
            open_requests=len(self.requests),
            waiting_tokens=self._waiting_tokens,
            running=len(self.requests) - self._num_waiting,
            prefill_tokens_s=prefill.tokens_s,
            token_slowdown_s=self._rates.slowdown.seconds,
        )

    def add(self, req: OpenRequest, cached_tokens: int) -> None:
        """Send a request to this engine."""
        req.cached_tokens = cached_tokens
        req.tokens_to_compute = max(req.known_tokens - cached_tokens, 1)
        req.sent_s = time.monotonic()
        self.requests[req.req_id] = req
        self._waiting_tokens += req.tokens_to_compute
        self._num_waiting += 1
        self.link.send(req.message())

    def remove(self, req: OpenRequest) -> None:
        """The request has ended or leaves this engine."""
        del self.requests[req.req_id]
        if req.tokens_to_compute:
            self._count_computed(req.tokens_to_compute)
            req.tokens_to_compute = 0

    def add_tokens(self, outs: Sequence[TokenIdOut], now_s: float) -> None:
        """Give the tokens of a step to their requests, and measure how long they took."""
        prefilled, begun_s = 0, now_s
        for out in outs:
            req = self.requests[out.req_id]
            tokens = req.tokens_to_compute
            if req.add_token(out.token.id):
                self._count_computed(tokens)
                prefilled, begun_s = prefilled + tokens, min(begun_s, req.sent_s)
        if prefilled:
            seconds = now_s - max(begun_s, self._last_prefill_s)
            self._prefill.observe(prefilled, seconds)
            self._rates.prefill.observe(prefilled, seconds)
            self._last_prefill_s = now_s
        elif self._last_tokens_s is not None and not self._num_waiting:
            self._rates.slowdown.observe(len(outs), now_s - self._last_tokens_s)
        self._last_tokens_s = now_s

    def check_idle(self) -> None:
        """Call it after requests have ended: the time until the next token is then no step's."""
        if not self.requests:
            self._last_tokens_s = None

    def _count_computed(self, tokens: int) -> None:
        self._waiting_tokens -= tokens
        self._num_waiting -= 1
