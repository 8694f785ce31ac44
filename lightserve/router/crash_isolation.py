"""Find the request that crashes the workers, so that it neither fails the others nor crashes every new worker."""

from __future__ import annotations

from collections.abc import Collection

from lightserve.router.req import Req


class CrashIsolation:
    """Makes every request that was in flight at a crash compute its next token alone, before it shares a step again.

    If the workers crash again while a request runs alone, that request causes the crash. The others only lose time.
    """

    def __init__(self) -> None:
        self.isolated: Req | None = None  # the request that runs alone in the workers now
        self._pending_ids: set[int] = set()  # requests that have to run alone until their next token

    @property
    def is_active(self) -> bool:
        return bool(self._pending_ids)

    def needs_isolation(self, req: Req) -> bool:
        return req.req_id in self._pending_ids

    def record_crash(self, in_flight: Collection[Req]) -> Req | None:
        """The workers crashed while they computed these requests.

        Returns the crashing request if it ran alone. Otherwise all of them have to run alone from now on.
        """
        isolated, self.isolated = self.isolated, None
        if isolated is not None and isolated in in_flight:
            return isolated
        self._pending_ids.update(req.req_id for req in in_flight)
        return None

    @property
    def pending_ids(self) -> list[int]:
        return list(self._pending_ids)

    def require(self, req: Req) -> None:
        """The request may have crashed the workers of another engine: it has to run alone until its next token."""
        self._pending_ids.add(req.req_id)

    def reset(self) -> None:
        self.isolated = None
        self._pending_ids.clear()

    def release(self, req: Req) -> None:
        """The request left the workers. It may be admitted again."""
        if req is self.isolated:
            self.isolated = None

    def clear(self, req: Req) -> None:
        """The request got a token or ended, so it did not crash the workers."""
        self.release(req)
        self._pending_ids.discard(req.req_id)
