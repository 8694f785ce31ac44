"""How many requests of batches run at the same time: what the engine has room for, and few while others wait."""

from __future__ import annotations

from lightserve.messages.output import RouterStats

FIRST_LIMIT = 8
MAX_KV_USAGE = 0.8  # of the pool: the rest is for clients, who come unannounced
CROWDED_SAMPLES = 2  # seconds for which requests wait before lines are stopped: a burst is over sooner


class ConcurrencyLimit:
    """Doubles the limit each second while nothing waits, halves it while something does."""

    def __init__(self, maximum: int) -> None:
        self.limit = min(FIRST_LIMIT, maximum)
        self.num_stopped = 0  # lines to stop now, the newest first; they begin again later
        self._maximum = maximum
        self._last: RouterStats | None = None
        self._num_crowded = 0  # samples in a row

    def update(self, stats: RouterStats | None, in_flight: int) -> None:
        """``stats``: the router's latest. It sends some each second."""
        self.num_stopped = 0
        if stats is None or stats is self._last:
            return
        self._last = stats
        is_crowded = stats.metrics.values["num_requests_waiting"] > 0
        self._num_crowded = self._num_crowded + 1 if is_crowded else 0
        if is_crowded:
            self.limit = min(self.limit, in_flight) // 2
        elif stats.metrics.values["kv_cache_usage_perc"] < MAX_KV_USAGE:
            self.limit = min(max(2 * self.limit, 1), self._maximum)
        if self._num_crowded >= CROWDED_SAMPLES:
            self.num_stopped = max(in_flight - max(self.limit, 1), 0)  # one goes on, so that a batch always ends
