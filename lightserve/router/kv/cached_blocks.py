"""Which blocks of tokens are in the prefix cache, for the dispatcher that routes by them (--dp, --engines).

A block is cached as long as the cache owns the slot of its last token: prefixes lose their ends first. So one number
for each slot is enough to know which blocks go when slots are freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS, Hashes, block_hashes
from lightserve.messages.cluster import KvCacheEvents
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.slots import Slots
from lightserve.router.req import Req


class CachedBlocks:
    """Of all pools of an engine: every attention group has one. The group that has a prefix gets its requests."""

    def __init__(self, pools: Iterable[KvPool]) -> None:
        self._epoch = 0
        self._sent_epoch = 0
        self._counts: Counter[int] = Counter()  # by block: slots with its last token
        self._changes: dict[int, bool] = {}  # since the last events: whether the block is cached now
        for pool in pools:
            pool.add_listener(_BlocksOfPool(pool.size, self))

    def add(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._counts[block] += 1
            self._changes[block] = True

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                self._changes[block] = False

    def clear(self) -> None:
        """All KV is lost. The groups lose theirs together."""
        self._counts.clear()
        self._changes.clear()
        self._epoch += 1

    def all_blocks(self) -> KvCacheEvents:
        """For a dispatcher that knows nothing yet. It may get some of them again with the next events."""
        return KvCacheEvents(self._epoch, _bytes(list(self._counts)), b"")

    def take_events(self) -> KvCacheEvents | None:
        """What has changed since the last call; None: nothing."""
        if not self._changes and self._sent_epoch == self._epoch:
            return None
        changes, self._changes, self._sent_epoch = self._changes, {}, self._epoch
        added = [block for block, is_cached in changes.items() if is_cached]
        evicted = [block for block, is_cached in changes.items() if not is_cached]
        return KvCacheEvents(self._epoch, _bytes(added), _bytes(evicted))


class _BlocksOfPool(PoolListener):
    def __init__(self, size: int, blocks: CachedBlocks) -> None:
        self._hash_of_slot: Hashes = np.zeros(size, dtype="<i8")  # of the block whose last token is there; 0: none
        self._blocks = blocks

    def on_cached(self, req: Req, slots: Slots, begin: int, end: int) -> None:
        first, last = begin // BLOCK_TOKENS, end // BLOCK_TOKENS
        if first == last:
            return
        slots = np.array(slots[(first + 1) * BLOCK_TOKENS - 1 : last * BLOCK_TOKENS : BLOCK_TOKENS], dtype=np.int32)
        hashes, before = _hashes_of(req, last)[first:last], self._hash_of_slot[slots]
        is_new = before != hashes  # other blocks are those of another request
        self._hash_of_slot[slots] = hashes
        self._blocks.remove(before[is_new & (before != 0)].tolist())
        self._blocks.add(hashes[is_new].tolist())

    def on_freed(self, slots: Slots) -> None:
        hashes = self._hash_of_slot[slots]
        hashes = hashes[hashes != 0]
        if len(hashes):
            self._hash_of_slot[slots] = 0
            self._blocks.remove(hashes.tolist())

    def on_reset(self) -> None:
        self._hash_of_slot[:] = 0
        self._blocks.clear()


def _hashes_of(req: Req, blocks: int) -> Hashes:
    """Those of the prompt came with the request. Blocks with output tokens follow."""
    if blocks > len(req.block_hashes):
        req.block_hashes = block_hashes(req.token_ids[: blocks * BLOCK_TOKENS], req.salt, req.block_hashes)
    return req.block_hashes


def _bytes(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<i8").tobytes()
