"""How much work an engine has, and how fast it is, as its answers show. The caller passes the time.

The dispatcher and the simulator use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightserve.cluster.rates import DecodeSlowdown, PrefillRate
from lightserve.cluster.routing import EngineLoad


class SharedRates:
    """Measured over all engines: for an engine that has not been measured, and where differences do not matter."""

    def __init__(self) -> None:
        self.prefill = PrefillRate()
        self.slowdown = DecodeSlowdown()


@dataclass(slots=True, eq=False)
class Assignment:
    """A request that an engine has, as the load of the engine counts it."""

    missing_tokens: int  # of its prompt, which the engine had not cached when it got the request
    tokens_to_compute: int  # before its next token; 0: it has one from this engine
    begun_s: float  # when the engine could begin to compute them
    waits_for_kv: bool = False  # of its prompt, from another engine
    is_measured: bool = True  # its first token shows how fast the engine computes prompts


class MeasuredLoad:
    def __init__(self, engine: int, rates: SharedRates) -> None:
        self._engine = engine
        self._rates = rates
        self._prefill = PrefillRate()
        self._num_open = 0
        self._num_computing = 0  # requests without a token from this engine that do not wait for KV
        self._waiting_tokens = 0
        self._last_prefill_s = 0.0
        self._last_tokens_s: float | None = None  # None: it was idle

    def load(self) -> EngineLoad:
        prefill = self._prefill if self._prefill.is_measured else self._rates.prefill
        return EngineLoad(
            self._engine,
            open_requests=self._num_open,
            waiting_tokens=self._waiting_tokens,
            running=self._num_open - self._num_computing,
            prefill_tokens_s=prefill.tokens_s,
            decode_slowdown_s=self._rates.slowdown.seconds,
        )

    def add(self, tokens: int, now_s: float) -> Assignment:
        """The engine gets a request, and computes so many tokens before it returns one."""
        return self._add(Assignment(tokens, tokens, now_s))

    def add_waiting_for_kv(self, missing_tokens: int, tokens: int, now_s: float) -> Assignment:
        """The engine gets a request, of whose missing prompt a prefill engine computes all but so many tokens."""
        tokens = min(tokens, missing_tokens)
        return self._add(Assignment(missing_tokens, tokens, now_s, waits_for_kv=True, is_measured=False))

    def compute_itself(self, assignment: Assignment, now_s: float, is_measured: bool) -> None:
        """The KV that a request waits for does not come. ``is_measured``: no part of it has come either."""
        if assignment.waits_for_kv:
            self._waiting_tokens += assignment.missing_tokens - assignment.tokens_to_compute
            self._num_computing += 1
            assignment.tokens_to_compute, assignment.begun_s = assignment.missing_tokens, now_s
            assignment.waits_for_kv, assignment.is_measured = False, is_measured

    def remove(self, assignment: Assignment) -> None:
        """The request has ended or left."""
        self._num_open -= 1
        self._count_computed(assignment)
        if not self._num_open:  # the time until the next token is no step's
            self._last_tokens_s = None

    def observe_step(
        self, num_requests: int, assignments: Iterable[Assignment], now_s: float, num_tokens: int = 0
    ) -> None:
        """A step returned tokens of so many requests. ``num_tokens``: if some got several, as with drafts.

        ``assignments`` are these requests; those that had a token before may be left out.
        """
        firsts = [assignment for assignment in assignments if assignment.tokens_to_compute]
        measured = [assignment for assignment in firsts if assignment.is_measured]
        if measured:
            prefilled, begun_s = (
                sum(assignment.tokens_to_compute for assignment in measured),
                min(assignment.begun_s for assignment in measured),
            )
            seconds = now_s - max(begun_s, self._last_prefill_s)
            self._prefill.observe(prefilled, seconds)
            self._rates.prefill.observe(prefilled, seconds)
            self._last_prefill_s = now_s
        elif self._last_tokens_s is not None and not firsts and not self._num_computing:
            token_s = (now_s - self._last_tokens_s) * num_requests / max(num_tokens, num_requests)
            self._rates.slowdown.observe(num_requests, token_s)
        for assignment in firsts:
            self._count_computed(assignment)
        self._last_tokens_s = now_s

    def _add(self, assignment: Assignment) -> Assignment:
        self._num_open += 1
        self._num_computing += not assignment.waits_for_kv
        self._waiting_tokens += assignment.tokens_to_compute
        return assignment

    def _count_computed(self, assignment: Assignment) -> None:
        """The request has its first token from this engine, or leaves without one."""
        if assignment.tokens_to_compute:
            self._waiting_tokens -= assignment.tokens_to_compute
            self._num_computing -= not assignment.waits_for_kv
            assignment.tokens_to_compute, assignment.waits_for_kv = 0, False
