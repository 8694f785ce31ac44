"""What follows the prefix cache: it hears which tokens are cached and which slots are freed."""

from __future__ import annotations

from lightserve.router.kv.slots import Slots
from lightserve.router.req import Req


class PoolListener:
    """A listener implements the methods that it needs. KvPool calls them after it has changed the cache."""

    def on_cached(self, req: Req, slots: Slots, begin: int, end: int) -> None:
        """The cache owns ``slots``, those of the request's first tokens. New are those from ``begin`` to ``end``."""

    def on_evicted(self, slots: Slots) -> None:
        """The cache makes room. ``on_freed`` follows. No step writes to these slots before the next one."""

    def on_freed(self, slots: Slots) -> None:
        """The cache does not own these slots any more, if it ever did."""

    def on_discarded(self, req: Req) -> None:
        """The KV of the request, which has ended, may be wrong. ``on_freed`` follows."""

    def on_steps_failed(self) -> None:
        """It is unknown what the steps in flight computed. ``on_freed`` follows, for what the cache owned of it."""

    def on_reset(self) -> None:
        """All KV is lost."""
