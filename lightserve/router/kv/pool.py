"""The KV memory that the scheduler allocates: slots are free, private to a request, or shared in the prefix cache.

A request holds the slots of its tokens in order. The first ``shared_len`` slots belong to the cache and are locked
there; the others are private. A prompt's tokens move into the cache as soon as a step that computes them is planned, so
that other requests can share them while the prompt still prefills: workers run steps in order.

Layers may have a pool of their own beside this one, where cached tokens lose their slots early: see group_pool.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightserve.messages.int_arrays import NO_INT32
from lightserve.router.kv.group_pool import KvGroupPool
from lightserve.router.kv.group_pools import KvGroupPools
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.radix_cache import Ids, RadixCache, RadixNode
from lightserve.router.kv.slots import Slots, TokenSlots
from lightserve.router.req import Req, take_spare_slots


class CachedPrefix(NamedTuple):
    """What the cache has of a request's prefix."""

    usable_len: int  # tokens that the request can take
    slots: Slots  # of all its cached tokens, if there are KV groups: they may have lost what the next token needs


class PrefixLoad(NamedTuple):
    """A part of a prefix that comes from another place."""

    req: Req  # it may have ended meanwhile
    ids: Ids  # from the beginning to the end of the part
    node: RadixNode  # locked: the end of the tokens before the part
    cached: Slots  # of the tokens before
    slots: Slots  # of the part
    group_blocks: tuple[tuple[int, ...], ...] = ()  # of the prefix, that go to the pool of each KV group
    group_slots: tuple[Slots, ...] = ()


class KvPool:
    def __init__(self, size: int, groups: Sequence[KvGroupPool] = (), lookahead: int = 0) -> None:
        """``groups``: pools of layers beside this one, by the number of their KV group.

        ``lookahead``: the KV of a token depends on so many tokens after it, as that of a draft head does. The last
        tokens of a cached prefix are then computed again by a request that continues it in another way.
        """
        self._lookahead = lookahead
        self.num_evicted = 0  # tokens that the cache has evicted to make room
        self.num_cached_chunks = 0  # of prompts, while they were computed
        self._listeners: list[PoolListener] = []
        self.groups = KvGroupPools(groups)
        self._size = size
        self.reset()

    def reset(self) -> None:
        """All KV is lost."""
        self.slots = TokenSlots(self._size)
        self._cache = RadixCache()
        self._pinned: list[RadixNode] = []
        self.pinned_tokens = 0
        self.loading_tokens = 0  # whose slots loads hold, and no request
        self.num_loads = 0  # some have slots of KV groups only
        self.groups.reset()
        for listener in self._listeners:
            listener.on_reset()

    def add_listener(self, listener: PoolListener) -> None:
        self._listeners.append(listener)

    @property
    def size(self) -> int:
        return self.slots.size

    @property
    def available(self) -> int:
        """Tokens that can be allocated, if need be by evicting cached tokens that no request uses."""
        available = self.slots.num_free + self.cached_tokens
        return min(available, self.groups.available) if self.groups else available

    @property
    def used(self) -> int:
        return self.slots.num_used - self.cached_tokens

    @property
    def max_chunk(self) -> int:
        """The most tokens of one request that fit into a step while no other request runs."""
        return min(self.size, self.groups.max_chunk)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache that no request uses."""
        return self._cache.evictable_tokens

    @property
    def shared_tokens(self) -> int:
        """Tokens in the cache that requests use."""
        return self._cache.referenced_tokens

    def alloc(self, count: int) -> Slots:
        """The caller has checked that ``count`` tokens are available."""
        short = count - self.slots.num_free
        if short > 0:
            evicted = self._cache.evict(short)
            self.num_evicted += len(evicted)
            for listener in self._listeners:
                listener.on_evicted(evicted)
            self._free(evicted)
        return self.slots.alloc(count)

    def cached_len(self, req: Req) -> int:
        if not self.groups:
            return req.usable_len(self._cache.match_len(cacheable(req), req.salt))
        return self._usable_len(req, self._cache.find_slots(cacheable(req), req.salt))

    def _usable_len(self, req: Req, tokens: Slots) -> int:
        """How many tokens of a cached prefix a request can take: it and every group can continue from there."""
        usable, before = len(tokens), -1
        while usable != before:
            before, usable = usable, req.usable_len(usable)
            usable = self.groups.usable_len(tokens[:usable])
        return usable

    def cached_prefix(self, req: Req) -> CachedPrefix:
        if not self.groups:
            return CachedPrefix(self.cached_len(req), NO_INT32)
        slots = self._cache.find_slots(cacheable(req), req.salt)
        return CachedPrefix(self._usable_len(req, slots), slots)

    def start_load(self, req: Req, begin: int, end: int, group_blocks: tuple[tuple[int, ...], ...] = ()) -> PrefixLoad:
        """Slots for tokens of the request from ``begin`` to ``end``, before which all are cached.

        The tokens before stay cached until ``finish_load``. The caller has checked that ``end`` tokens are available.
        ``group_blocks``: blocks before ``end`` whose KV goes to each group, which has room for it.
        """
        ids = cacheable(req)[:end].copy()
        node, cached = self._cache.match(ids[:begin], req.salt)
        self._cache.lock(node)
        self.loading_tokens += end - begin
        self.num_loads += 1
        slots = self.alloc(end - begin)
        return PrefixLoad(req, ids, node, cached, slots, group_blocks, self.groups.start_load(group_blocks))

    def shorten_load(self, load: PrefixLoad, count: int) -> PrefixLoad:
        """Only the first ``count`` tokens of the part have come, and nothing of groups. Other slots are free."""
        self.groups.finish_load(load.group_blocks, load.group_slots, NO_INT32)
        self._free(load.slots[count:])
        self.loading_tokens -= len(load.slots) - count
        ids, slots = load.ids[: len(load.cached) + count], load.slots[:count]
        return load._replace(ids=ids, slots=slots, group_blocks=(), group_slots=())

    def finish_load(self, load: PrefixLoad, is_valid: bool, was_sent: bool = False) -> None:
        """The slots of the load hold the KV of their tokens, if it ``is_valid``. From now on requests can share it.

        ``was_sent``: by another engine.
        """
        self._cache.unlock(load.node)
        self.loading_tokens -= len(load.slots)
        self.num_loads -= 1
        if not is_valid:
            self.groups.finish_load(load.group_blocks, load.group_slots, NO_INT32)
            self._free(load.slots)
            return
        slots = np.concatenate((load.cached, load.slots))
        _, spare = self._cache.insert(load.ids, slots, load.req.salt)
        if load.group_slots:
            tokens = self._cache.find_slots(load.ids, load.req.salt)
            self.groups.finish_load(load.group_blocks, load.group_slots, tokens, was_sent)
        self._notify_inserted(load.req, load.ids, len(load.cached))
        self.num_cached_chunks += 1
        self._free(spare)

    def attach_prefix(self, req: Req) -> None:
        """Give a request the slots of its cached prefix, and lock them.

        The last token is never taken from the cache: it must be computed to sample the next one.
        """
        if not req.shares_prefix:
            return
        ids, matched_len = cacheable(req), 0
        if self.groups or self._lookahead or req.images:
            cached = self._cache.find_slots(ids, req.salt)
            cached = cached[: max(len(cached) - self._lookahead, 0)]
            ids, matched_len = ids[: self._usable_len(req, cached)], len(cached)
        node, slots = self._cache.match(ids, req.salt)
        self._cache.lock(node)
        req.attach(node, slots)
        self.groups.attach(req, slots, matched_len)

    def cache_prompt(self, req: Req) -> None:
        """Move the planned tokens of the prompt into the cache, unless another request's tokens are there already."""
        end = min(req.planned_len, len(req.prompt_ids))
        if req.node is None or end <= req.shared_len:
            return
        begin = req.shared_len
        ids, slots = req.prompt_ids[begin:end], req.slots[begin:end]
        grown = self._cache.extend(req.node, ids, slots)
        if grown is not None:
            self._cache.lock(grown)
            self._cache.unlock(req.node)
            req.node, req.shared_len = grown, end
            self.num_cached_chunks += 1
            for listener in self._listeners:
                listener.on_cached(req, req.slots, begin, end)
        elif self.groups:
            self._cache_instead(req, end)
        self._cache_groups(req, req.prompt_ids[:end], begin)

    def _cache_instead(self, req: Req, end: int) -> None:
        """Cache tokens of a prompt whose first ones it computed again, because a group could not continue behind them.

        The cache has their KV in other slots, which are freed. If another request uses these, nothing changes.
        """
        ids, begin = req.prompt_ids[:end], req.shared_len
        replaced = self._cache.replace(ids, begin, req.slots[:end], req.salt)
        if replaced is None or req.node is None:
            return
        node, old_slots = replaced
        self._cache.lock(node)
        self._cache.unlock(req.node)
        req.node, req.shared_len = node, end
        self.num_cached_chunks += 1
        self._free(old_slots)
        self._notify_inserted(req, ids, begin)

    def release(self, req: Req) -> None:
        """Free all slots of a request. If ``keeps_kv_cached``, its known tokens with planned KV stay in the cache."""
        cached_len = req.shared_len  # slots from here on are private
        known = req.cacheable_len if req.keeps_kv_cached else 0
        if known > cached_len:
            ids = req.token_ids[:known]
            _, spare = self._cache.insert(ids, req.slots[:known], req.salt)
            self._cache_groups(req, ids, cached_len, is_leaving=True)
            self._notify_inserted(req, ids, cached_len)
            self._free(spare)
            cached_len = known
        elif known:
            self._cache_groups(req, req.token_ids[:known], cached_len, is_leaving=True)
        self._free(req.slots[cached_len:])
        if req.node is not None:
            self._cache.unlock(req.node)
            if not req.keeps_kv_cached:  # other choices of the same request may still use it
                self._free(self._cache.drop(req.node))
        self.groups.release(req)
        req.clear_slots()

    def take_back(self, req: Req) -> None:
        """A request gives back the slots behind its planned tokens. No step in flight writes to them."""
        self.groups.take_back(req)
        self._free(take_spare_slots(req))

    def pin(self, ids: Ids, salt: str) -> int:
        """Never evict what is cached of this prefix. Returns its number of tokens."""
        referenced = self._cache.referenced_tokens
        node, slots = self._cache.match(ids, salt)
        self._cache.lock(node)
        self.pinned_tokens += self._cache.referenced_tokens - referenced  # prompts may have beginnings in common
        self._pinned.append(node)
        self.groups.pin(slots)
        return len(slots)

    def unpin(self) -> None:
        """Of all prefixes: they stay cached until others need their slots."""
        for node in self._pinned:
            self._cache.unlock(node)
        self._pinned.clear()
        self.pinned_tokens = 0
        self.groups.unpin()

    def clear_cache(self) -> None:
        """Drop all cached prefixes that no request uses and that are not pinned."""
        self._free(self._cache.clear())

    def discard(self, req: Req) -> None:
        """Remove the tokens of a released request from the cache, unless another request shares them.

        Their KV may contain numbers that are not finite. It may have computed the KV of shared tokens again in groups.
        """
        for listener in self._listeners:
            listener.on_discarded(req)
        node, slots = self._cache.match(req.token_ids, req.salt)
        self.groups.remove_cached(slots)
        self._free(self._cache.drop(node))

    def roll_back(self, slots: Slots, group_slots: Sequence[Slots]) -> None:
        """Remove tokens from the cache whose KV is in these slots: the steps that should compute it have failed."""
        for listener in self._listeners:
            listener.on_steps_failed()
        self._free(self._cache.drop_slots(slots))
        self.groups.invalidate(group_slots)

    def _cache_groups(self, req: Req, ids: Ids, begin: int, is_leaving: bool = False) -> None:
        """The first tokens of the request are cached. Its own are from ``begin`` on, or others had cached them too."""
        if not self.groups:
            return
        self.groups.add_cached(req, self._cache.find_slots(ids, req.salt), begin, is_leaving)

    def _free(self, slots: Slots) -> None:
        if not len(slots):
            return
        self.groups.remove_cached(slots)
        for listener in self._listeners:
            listener.on_freed(slots)
        self.slots.free(slots)

    def _notify_inserted(self, req: Req, ids: Ids, begin: int) -> None:
        """The first tokens of the request are cached, in its slots or in those of others."""
        if not self._listeners:
            return
        slots = self._cache.find_slots(ids, req.salt)
        for listener in self._listeners:
            listener.on_cached(req, slots, begin, len(ids))


def cacheable(req: Req) -> Ids:
    """The tokens whose KV the request may take from the cache."""
    if req.needs_prompt_computed:
        return req.prompt_ids[:0]
    return req.token_ids[:-1]  # no copy without outputs: a policy may look up the whole queue at every step
