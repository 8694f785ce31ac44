"""How much work an engine has, and how fast it is, as its answers show. The caller passes the time.

The dispatcher and the simulator use it.
"""

from __future__ import annotations

from lightserve.cluster.rates import PrefillRate, TokenSlowdown
from lightserve.cluster.routing import EngineLoad


class SharedRates:
    """Measured over all engines: for an engine that has not been measured, and where differences do not matter."""

    def __init__(self) -> None:
        self.prefill = PrefillRate()
        self.slowdown = TokenSlowdown()


class MeasuredLoad:
    def __init__(self, engine: int, rates: SharedRates) -> None:
        self._engine = engine
        self._rates = rates
        self._prefill = PrefillRate()
        self._num_open = 0
        self._num_waiting = 0  # requests without a token from this engine
        self._waiting_tokens = 0
        self._last_prefill_s = 0.0
        self._last_tokens_s: float | None = None  # None: it was idle

    def load(self) -> EngineLoad:
        prefill = self._prefill if self._prefill.is_measured else self._rates.prefill
        return EngineLoad(
            self._engine,
            open_requests=self._num_open,
            waiting_tokens=self._waiting_tokens,
            running=self._num_open - self._num_waiting,
            prefill_tokens_s=prefill.tokens_s,
            token_slowdown_s=self._rates.slowdown.seconds,
        )

    def add(self, tokens: int) -> None:
        """The engine gets a request, and computes so many tokens before it returns one."""
        self._num_open += 1
        self._num_waiting += 1
        self._waiting_tokens += tokens

    def count_computed(self, tokens: int) -> None:
        """A request has its first token from this engine, or has left without one."""
        self._waiting_tokens -= tokens
        self._num_waiting -= 1

    def remove(self) -> None:
        """A request has ended or left."""
        self._num_open -= 1
        if not self._num_open:  # the time until the next token is no step's
            self._last_tokens_s = None

    def observe_step(self, num_tokens: int, prefilled: int, begun_s: float, now_s: float) -> None:
        """A step returned so many tokens, and the first ones of prompts with ``prefilled`` tokens, sent at ``begun_s``
        or later."""
        if prefilled:
            seconds = now_s - max(begun_s, self._last_prefill_s)
            self._prefill.observe(prefilled, seconds)
            self._rates.prefill.observe(prefilled, seconds)
            self._last_prefill_s = now_s
        elif self._last_tokens_s is not None and not self._num_waiting:
            self._rates.slowdown.observe(num_tokens, now_s - self._last_tokens_s)
        self._last_tokens_s = now_s
