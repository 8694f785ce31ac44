"""The requests that run in the workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightserve.router.crash_isolation import CrashIsolation
from lightserve.router.kv_pool import KvPool
from lightserve.router.req import Req
from lightserve.router.scheduler.lora_slots import LoraSlots


class RunningBatch:
    """Admitted requests in the order of admission, and the requests that the workers hold."""

    def __init__(self, pool: KvPool, isolation: CrashIsolation, loras: LoraSlots) -> None:
        self.pool = pool
        self.loras = loras
        self.isolation = isolation
        self._in_workers: set[int] = set()  # requests that have a row in the workers after the last planned step
        self._released: dict[int, None] = {}  # requests that left since then, in order
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
        self.loras.acquire(req)

    def release(self, req: Req) -> None:
        """Remove a request from the workers and free its KV."""
        self.isolation.release(req)
        del self._reqs[req.req_id]
        self.pool.release(req)
        self.loras.release(req)
        self._released[req.req_id] = None

    @property
    def has_rows_to_free(self) -> bool:
        return not self._in_workers.isdisjoint(self._released)

    def take_new_and_freed(self, admitted: Iterable[Req]) -> tuple[list[Req], list[int]]:
        """Return the requests that enter the workers with the next step, and the ids that the workers free before it.

        A request may be preempted and admitted again between two steps, in either order: what the workers have to do
        depends on whether they hold the request, and on whether it runs now.
        """
        free = [req_id for req_id in self._released if req_id in self._in_workers]
        new = [req for req in admitted if req in self]
        self._released.clear()
        self._in_workers.difference_update(free)
        self._in_workers.update(req.req_id for req in new)
        return new, free

    def clear(self) -> list[Req]:
        """The workers hold no requests any more. Returns the requests that ran; they keep what they hold."""
        reqs = list(self)
        self.loras.clear()
        self._reqs.clear()
        self._released.clear()
        self._in_workers.clear()
        return reqs
