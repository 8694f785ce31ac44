"""The requests that run in the workers."""

from __future__ import annotations

from collections.abc import Iterator

from lightserve.router.crash_isolation import CrashIsolation
from lightserve.router.kv_pool import KvPool
from lightserve.router.req import Req


class RunningBatch:
    """Admitted requests in the order of admission, and the requests that the workers have to free."""

    def __init__(self, pool: KvPool, isolation: CrashIsolation) -> None:
        self.pool = pool
        self.isolation = isolation
        self.to_free: list[int] = []  # requests that left since the last step
        self._reqs: dict[int, Req] = {}

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def __contains__(self, req: Req) -> bool:
        return req.req_id in self._reqs

    def find(self, req_id: int) -> Req | None:
        return self._reqs.get(req_id)

    def add(self, req: Req) -> None:
        self._reqs[req.req_id] = req

    def release(self, req: Req) -> None:
        """Remove a request from the workers and free its KV."""
        self.isolation.release(req)
        del self._reqs[req.req_id]
        self.pool.close(req)
        self.to_free.append(req.req_id)

    def clear(self) -> list[Req]:
        """The workers died, with all KV and all requests."""
        reqs = list(self)
        self._reqs.clear()
        self.to_free.clear()
        self.pool.reset()
        return reqs
