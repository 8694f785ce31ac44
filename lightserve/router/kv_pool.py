"""The KV memory that the scheduler allocates: slots are free, private to a request, or shared in the prefix cache.

A request holds the slots of its tokens in order. The first ``shared_len`` slots belong to the cache and are locked
there; the others are private. A prompt's tokens move into the cache as soon as a step that computes them is planned, so
that other requests can share them while the prompt still prefills: workers run steps in order.
"""

from __future__ import annotations

import numpy as np

from lightserve.common.kv.token_slots import Slots, TokenSlots
from lightserve.router.radix_cache import Ids, RadixCache
from lightserve.router.req import Req


class KvPool:
    def __init__(self, size: int) -> None:
        self.slots = TokenSlots(size)
        self.num_evicted = 0  # tokens that the cache has evicted to make room
        self._cache = RadixCache()

    def reset(self) -> None:
        """All KV is lost."""
        self.slots = TokenSlots(self.size)
        self._cache = RadixCache()

    @property
    def size(self) -> int:
        return self.slots.size

    @property
    def available(self) -> int:
        """Tokens that can be allocated, if need be by evicting cached tokens that no request uses."""
        return self.slots.num_free + self.cached_tokens

    @property
    def used(self) -> int:
        return self.size - self.available

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache that no request uses."""
        return self._cache.evictable_tokens

    @property
    def shared_tokens(self) -> int:
        """Tokens in the cache that requests use."""
        return self._cache.referenced_tokens

    def alloc(self, count: int) -> list[int]:
        """The caller has checked that ``count`` tokens are available."""
        short = count - self.slots.num_free
        if short > 0:
            evicted = self._cache.evict(short)
            self.num_evicted += len(evicted)
            self._free(evicted)
        slots: list[int] = self.slots.alloc(count).tolist()
        return slots

    def cached_len(self, req: Req) -> int:
        return self._cache.match_len(_cacheable(req), req.salt)

    def attach_prefix(self, req: Req) -> None:
        """Give a request the slots of its cached prefix, and lock them.

        The last token is never taken from the cache: it must be computed to sample the next one.
        """
        req.node, slots = self._cache.match(_cacheable(req), req.salt)
        self._cache.lock(req.node)
        req.slots = slots.tolist()
        req.shared_len = len(req.slots)

    def cache_prompt(self, req: Req) -> None:
        """Move the planned tokens of the prompt into the cache, unless another request's tokens are there already."""
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

    def release(self, req: Req) -> None:
        """Free all slots of a request. If ``keeps_kv_cached``, its known tokens with planned KV stay in the cache."""
        kept = req.shared_len  # slots from here on are private
        known = min(req.planned_len, req.total_len) if req.keeps_kv_cached else 0
        if known > kept:
            _, spare = self._cache.insert(_array(req.token_ids[:known]), _array(req.slots[:known]), req.salt)
            self._free(spare)
            kept = known
        self._free(_array(req.slots[kept:]))
        if req.node is not None:
            self._cache.unlock(req.node)
            if not req.keeps_kv_cached:  # other choices of the same request may still use it
                self._free(self._cache.drop(req.node))
        req.node, req.slots, req.shared_len, req.planned_len, req.certain_len = None, [], 0, 0, 0

    def discard(self, req: Req) -> None:
        """Remove the tokens of a released request from the cache, unless another request shares them.

        Their KV may contain numbers that are not finite.
        """
        node, _ = self._cache.match(_array(req.token_ids), req.salt)
        self._free(self._cache.drop(node))

    def roll_back(self, slots: list[int]) -> None:
        """Remove tokens from the cache whose KV is in these slots: the steps that should compute it have failed."""
        self._free(self._cache.drop_slots(_array(slots)))

    def _free(self, slots: Slots) -> None:
        if len(slots):
            self.slots.free(slots)


def _cacheable(req: Req) -> Ids:
    """The tokens whose KV the request may take from the cache."""
    if req.needs_prompt_computed:
        return req.prompt[:0]
    if not req.output_ids:
        return req.prompt[:-1]  # no copy: a policy may look up the whole queue at every step
    return _array(req.token_ids[:-1])


def _array(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int32)
