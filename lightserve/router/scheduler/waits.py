"""Why a waiting request cannot run though there is room: its adapter has no slot, or another request computes its
prefix. Requests that wait for KV of other places are in ``router/kv``."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.router.kv.radix_cache import common_len, have_common_prefix
from lightserve.router.req import Req
from lightserve.router.req_queue import Place, QueuedReq, ReqQueue, Wait
from lightserve.router.scheduler.batch import RunningBatch
from lightserve.router.scheduler.lora_slots import LoraSlots

MAX_PASSED_OVER = 64  # requests that are admitted while one waits for a slot, before others with adapters wait for it
MIN_PENDING_PREFIX_TOKENS = 32  # a request waits for a prefix of so many tokens that another one computes now


class AdapterWaits:
    """Requests whose adapters have no slot on the device."""

    def __init__(self, loras: LoraSlots, queue: ReqQueue) -> None:
        self._loras = loras
        self._queue = queue
        self._waits: dict[int, Wait] = {}  # by adapter
        self._starving: Place | None = None  # requests with adapters behind this place wait too
        self._num_changes = 0, 0, 0

    def wait_of(self, req: Req) -> Wait | None:
        if req.lora_id is None:
            return None
        would_pass = self._starving is not None and self._queue.place_of(req) > self._starving
        if self._loras.has_room(req.lora_id) and not would_pass:
            return None
        return self._waits.setdefault(req.lora_id, Wait())

    def wake(self) -> bool:
        """Let requests come back for which there are slots now. Returns whether there are such requests."""
        changes = self._loras.num_changes, len(self._loras.loaded), self._queue.num_changes
        if not self._waits or changes == self._num_changes:
            return False
        self._waits = {lora_id: wait for lora_id, wait in self._waits.items() if wait.blocked}
        ready = self._ready()
        for wait in ready:
            wait.end()
        self._num_changes = *changes[:2], self._queue.num_changes
        return bool(ready)

    def _ready(self) -> list[Wait]:
        """As many adapters as can have slots, in the order of their first requests, up to a starving one."""
        ready, num_available = [], self._loras.num_available
        self._starving = None
        for lora_id, wait in sorted(self._waits.items(), key=lambda item: item[1].blocked[0].queue_place):
            if self._loras.has_slot(lora_id):
                ready.append(wait)
            elif num_available and lora_id in self._loras.loaded:
                num_available -= 1
                ready.append(wait)
            elif self._is_starving(wait.blocked[0]):
                self._starving = wait.blocked[0].queue_place
                break
        return ready

    def _is_starving(self, entry: QueuedReq) -> bool:
        return entry.req.num_admissions > 0 or self._queue.num_passed_over(entry) >= MAX_PASSED_OVER


class PrefixWaits:
    """Requests that will find a long part of their prompts in the cache soon, because another request computes it."""

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._waits: dict[tuple[int, int], Wait] = {}  # by the other request, and how many of its tokens are needed

    def wait_of(self, req: Req, prefilling: Sequence[Req]) -> Wait | None:
        candidates = [candidate for candidate in prefilling if candidate.salt == req.salt]
        if not candidates or req.needs_prompt_computed:
            return None
        enough = self._batch.pool.cached_len(req) + MIN_PENDING_PREFIX_TOKENS
        for candidate in candidates:
            if have_common_prefix(req.prompt_ids, candidate.prompt_ids, enough):
                needed = self._needed(req, candidate)
                if candidate.planned_len < needed:
                    return self._waits.setdefault((candidate.req_id, needed), Wait())
        return None

    def _needed(self, req: Req, candidate: Req) -> int:
        """How many tokens of the other request must be planned. Recurrent layers keep their states there."""
        common = common_len(req.prompt_ids, candidate.prompt_ids)
        needed = self._batch.pool.groups.keep_at(candidate, min(common, len(req.prompt_ids) - 1))
        return common - MIN_PENDING_PREFIX_TOKENS + 1 if needed is None else needed

    def wake(self) -> None:
        """Let requests come back whose prefixes are cached now, or are not computed any more."""
        for (req_id, needed), wait in tuple(self._waits.items()):
            req = self._batch.find(req_id)
            if req is None or not req.is_prefilling or req.planned_len >= needed:
                del self._waits[req_id, needed]
                wait.end()
