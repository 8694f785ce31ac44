"""The KV memory as the scheduler spends it: slots that are free, private to a request, or shared in the prefix cache.

A request holds the slots of its tokens in order. The first of them, up to ``shared_len``, belong to the cache and are
locked there; the rest are the request's own. What a request computes of its prompt moves into the cache as soon as it
is planned, so that others may share it while it still prefills: workers run steps in order.
"""

from __future__ import annotations

import numpy as np

from lightserve.common.kv.token_slots import Slots, TokenSlots
from lightserve.router.radix_cache import Ids, RadixCache
from lightserve.router.req import Req


class KvPool:
    def __init__(self, size: int) -> None:
        self.slots = TokenSlots(size)
        self.num_evicted = 0  # tokens that the cache lost to make room
        self._cache = RadixCache()

    @property
    def size(self) -> int:
        return self.slots.size

    @property
    def available(self) -> int:
        """Tokens that can be had, by evicting what nobody uses."""
        return self.slots.num_free + self.cached_tokens

    @property
    def used(self) -> int:
        return self.size - self.available

    @property
    def cached_tokens(self) -> int:
        """Kept for those to come, and held by nobody."""
        return self._cache.evictable_tokens

    @property
    def shared_tokens(self) -> int:
        """In the cache, and held by requests."""
        return self._cache.referenced_tokens

    def alloc(self, count: int) -> list[int]:
        """The caller has made sure that ``count`` is available."""
        short = count - self.slots.num_free
        if short > 0:
            evicted = self._cache.evict(short)
            self.num_evicted += len(evicted)
            self._free(evicted)
        slots: list[int] = self.slots.alloc(count).tolist()
        return slots

    def cached_len(self, req: Req) -> int:
        return self._cache.match_len(_cacheable(req), req.salt)

    def open(self, req: Req) -> None:
        """Give a request what is cached of its tokens, all but the last, which must be computed to go on."""
        req.node, slots = self._cache.match(_cacheable(req), req.salt)
        self._cache.lock(req.node)
        req.slots = slots.tolist()
        req.shared_len = len(req.slots)

    def share(self, req: Req) -> None:
        """Move what is planned of the request's known tokens into the cache, unless another was faster."""
        end = min(req.planned_len, len(req.prompt_ids))
        if req.node is None or end <= req.shared_len:
            return
        begin = req.shared_len
        ids, slots = req.prompt[begin:end], _array(req.slots[begin:end])
        grown = self._cache.extend(req.node, ids, slots)
        if grown is None:
            return
        self._cache.lock(grown)
        self._cache.unlock(req.node)
        req.node, req.shared_len = grown, end

    def close(self, req: Req) -> None:
        """Take everything back; what is known and computed of it stays cached."""
        kept = req.shared_len  # tokens from here on are the request's own
        known = min(req.planned_len, req.total_len)
        if known > kept:
            _, spare = self._cache.insert(_array(req.token_ids[:known]), _array(req.slots[:known]), req.salt)
            self._free(spare)
            kept = known
        self._free(_array(req.slots[kept:]))
        if req.node is not None:
            self._cache.unlock(req.node)
        req.node, req.slots, req.shared_len, req.planned_len = None, [], 0, 0

    def discard(self, req: Req) -> None:
        """Take everything back and keep nothing cached that only this request knows: it may be spoilt."""
        self.close(req)
        node, _ = self._cache.match(_array(req.token_ids), req.salt)
        self._free(self._cache.drop(node))

    def _free(self, slots: Slots) -> None:
        if len(slots):
            self.slots.free(slots)


def _cacheable(req: Req) -> Ids:
    """The tokens whose KV it may take from the cache."""
    if req.needs_prompt_computed:
        return req.prompt[:0]
    if not req.output_ids:
        return req.prompt[:-1]  # no copy: a policy may ask this of the whole queue at every step
    return _array(req.token_ids[:-1])


def _array(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int32)
