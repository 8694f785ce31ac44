"""Whether KV should be loaded or computed: a tier that is slower than computing is worse than none. Pure."""

from __future__ import annotations

DECAY = 0.8  # of older measurements, with each new one
PROBE_S = 60.0  # a tier that was slower than computing is tried again after so many seconds
MIN_STEP_TOKENS = 16  # of prompts: a step with fewer says little about the speed of a long prompt
MIN_DEADLINE_S = 0.05  # a hiccup of the machine must not waste a load


class Rate:
    """Units per second, from measurements whose weight is their duration."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def observe(self, units: float, seconds: float) -> None:
        self._units = self._units * DECAY + units
        self._seconds = self._seconds * DECAY + max(seconds, 1e-9)

    @property
    def is_known(self) -> bool:
        return self._units > 0

    @property
    def per_second(self) -> float:
        return self._units / self._seconds if self._seconds else 0.0

    def seconds(self, units: float) -> float:
        """How long so many units take. The rate is known."""
        return units / self.per_second


class LoadOrRecompute:
    """Of one tier. All amounts are tokens; ``bytes_per_token`` is the same for all of them."""

    def __init__(self, bytes_per_token: int, computing: Rate | None = None) -> None:
        """``computing``: what another tier measures."""
        self._bytes_per_token = bytes_per_token
        self._computing = computing or Rate()
        self._loading = Rate()
        self._last_load_s = float("-inf")

    @property
    def bytes_per_second(self) -> float:
        """That loads bring; 0: none was measured."""
        return self._loading.per_second * self._bytes_per_token

    @property
    def computed_per_second(self) -> float:
        """Prompt tokens; 0: none were measured."""
        return self._computing.per_second

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        """A step took so long. It computed so many tokens of prompts, and perhaps other tokens beside them."""
        if prompt_tokens >= MIN_STEP_TOKENS:
            self._computing.observe(prompt_tokens, seconds)

    def observe_load(self, tokens: int, seconds: float, now_s: float) -> None:
        self._loading.observe(tokens, seconds)
        self._last_load_s = now_s

    def allows(self, tokens: int, queued_tokens: int, now_s: float) -> bool:
        """Whether to load so many tokens after ``queued_tokens`` others. What was never measured is tried."""
        if not self._loading.is_known or not self._computing.is_known:
            return True
        if self._loading.seconds(tokens + queued_tokens) < self._computing.seconds(tokens):
            return True
        is_slow = self._loading.per_second <= self._computing.per_second  # and not only busy now
        return is_slow and now_s - self._last_load_s >= PROBE_S

    def deadline_s(self, tokens: int, now_s: float) -> float:
        """When a request stops waiting for a load and computes: when it would have computed the tokens itself."""
        if not self._computing.is_known:
            return now_s + PROBE_S
        return now_s + max(self._computing.seconds(tokens), MIN_DEADLINE_S)
