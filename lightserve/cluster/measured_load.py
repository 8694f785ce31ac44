"""How much work an engine has, and how fast it is, as its answers show. The caller passes the time.

The dispatcher and the simulator use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightserve.cluster.rates import PrefillRate, TokenSlowdown
from lightserve.cluster.routing import EngineLoad


class SharedRates:
    """Measured over all engines: for an engine that has not been measured, and where differences do not matter."""

    def __init__(self) -> None:
        self.prefill = PrefillRate()
        self.slowdown = TokenSlowdown()


@dataclass(slots=True, eq=False)
class Assignment:
    """A request that an engine has, as the load of the engine counts it."""

    tokens_to_compute: int  # before its next token; 0: it has one from this engine
    sent_s: float


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

    def add(self, tokens: int, now_s: float) -> Assignment:
        """The engine gets a request, and computes so many tokens before it returns one."""
        self._num_open += 1
        self._num_waiting += 1
        self._waiting_tokens += tokens
        return Assignment(tokens, now_s)

    def remove(self, assignment: Assignment) -> None:
        """The request has ended or left."""
        self._num_open -= 1
        self._count_computed(assignment)
        if not self._num_open:  # the time until the next token is no step's
            self._last_tokens_s = None

    def observe_step(self, num_tokens: int, assignments: Iterable[Assignment], now_s: float) -> None:
        """A step returned so many tokens. ``assignments`` are their requests; those that had one before may be left
        out."""
        prefilled, begun_s = 0, now_s
        for one in assignments:
            if one.tokens_to_compute:
                prefilled, begun_s = prefilled + one.tokens_to_compute, min(begun_s, one.sent_s)
                self._count_computed(one)
        if prefilled:
            seconds = now_s - max(begun_s, self._last_prefill_s)
            self._prefill.observe(prefilled, seconds)
            self._rates.prefill.observe(prefilled, seconds)
            self._last_prefill_s = now_s
        elif self._last_tokens_s is not None and not self._num_waiting:
            self._rates.slowdown.observe(num_tokens, now_s - self._last_tokens_s)
        self._last_tokens_s = now_s

    def _count_computed(self, assignment: Assignment) -> None:
        """The request has its first token from this engine, or leaves without one."""
        if assignment.tokens_to_compute:
            self._waiting_tokens -= assignment.tokens_to_compute
            self._num_waiting -= 1
            assignment.tokens_to_compute = 0
