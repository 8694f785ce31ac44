"""Who may have killed a worker. A request that does so must not take the others with it, nor every worker to come."""

from __future__ import annotations

from collections.abc import Collection

from lightserve.router.req import Req


class Suspects:
    """Requests whose step a worker died at. Each gets its next token alone before it shares a step again.

    So a second death names the one to blame, and the others lose no more than time.
    """

    def __init__(self) -> None:
        self.on_trial: Req | None = None  # in the workers, and alone in every step
        self._ids: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ids)

    def __contains__(self, req: Req) -> bool:
        return req.req_id in self._ids

    def accuse(self, under_way: Collection[Req]) -> Req | None:
        """A worker died at the steps of these: the one to blame if it was alone, else all are suspects."""
        on_trial, self.on_trial = self.on_trial, None
        if on_trial is not None and on_trial in under_way:
            return on_trial
        self._ids.update(req.req_id for req in under_way)
        return None

    def adjourn(self, req: Req) -> None:
        """It left the workers, and may come back."""
        if req is self.on_trial:
            self.on_trial = None

    def acquit(self, req: Req) -> None:
        """It got its token, or is gone."""
        self.adjourn(req)
        self._ids.discard(req.req_id)
