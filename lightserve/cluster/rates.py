"""How fast an engine is, measured from its answers. The caller passes the time."""

from __future__ import annotations

KEPT = 0.95  # of the weight of older measurements, at each new one
FIRST_PREFILL_TOKENS_S = 5_000.0  # until one is measured: all engines begin with the same
FIRST_OUTPUT_TOKENS = 128.0  # of a request, until some have ended
MIN_VARIANCE = 0.5  # of the number of running requests, below which no slope can be seen


class PrefillRate:
    """Prompt tokens that an engine computes per second while it has prompts to compute."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def is_measured(self) -> bool:
        return self._seconds > 0

    @property
    def tokens_s(self) -> float:
        return self._tokens / self._seconds if self.is_measured else FIRST_PREFILL_TOKENS_S

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in this time. Single measurements may be 0."""
        self._tokens = KEPT * self._tokens + max(tokens, 1)
        self._seconds = KEPT * self._seconds + max(seconds, 1e-6)


class DecodeSlowdown:
    """How much longer a token takes with each further running request: the slope of a line through times of a token."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    @property
    def seconds(self) -> float:
        """0 until the number of running requests has varied."""
        if not self._weight:
            return 0.0
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n**2
        if variance < MIN_VARIANCE:
            return 0.0
        return max((self._nt / self._weight - mean_n * mean_t) / variance, 0.0)

    def observe(self, running: int, token_s: float) -> None:
        self._weight = KEPT * self._weight + 1
        self._n = KEPT * self._n + running
        self._t = KEPT * self._t + token_s
        self._nn = KEPT * self._nn + running**2
        self._nt = KEPT * self._nt + running * token_s


class OutputLength:
    """Tokens that a request generates, by those that ended lately."""

    def __init__(self) -> None:
        self.tokens = FIRST_OUTPUT_TOKENS

    def observe(self, tokens: int) -> None:
        self.tokens = KEPT * self.tokens + (1 - KEPT) * tokens
