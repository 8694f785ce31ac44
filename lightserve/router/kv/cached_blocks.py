"""Which blocks of tokens are in the prefix cache, for the dispatcher that routes by them (--dp, --engines).

A block is cached as long as the cache owns the slot of its last token: prefixes lose their ends first. So one number
for each slot is enough to know which blocks go when slots are freed.
"""

from __future__ import annotations

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS, Hashes, block_hashes
from lightserve.messages.cluster import KvCacheEvents
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.slots import Slots
from lightserve.router.req import Req


class CachedBlocks(PoolListener):
    def __init__(self, size: int) -> None:
        self._hash_of_slot: Hashes = np.zeros(size, dtype="<i8")  # of the block whose last token is there; 0: none
        self._epoch = 0
        self._sent_epoch = 0
        self._changes: dict[int, bool] = {}  # since the last events: whether the block is cached now

    def on_cached(self, req: Req, slots: Slots, begin: int, end: int) -> None:
        first, last = begin // BLOCK_TOKENS, end // BLOCK_TOKENS
        if first == last:
            return
        slots = np.array(slots[(first + 1) * BLOCK_TOKENS - 1 : last * BLOCK_TOKENS : BLOCK_TOKENS], dtype=np.int32)
        hashes = _hashes_of(req, last)[first:last]
        is_new = self._hash_of_slot[slots] != hashes  # other blocks are those of another request
        self._hash_of_slot[slots] = hashes
        self._changes.update(dict.fromkeys(hashes[is_new].tolist(), True))

    def on_freed(self, slots: Slots) -> None:
        hashes = self._hash_of_slot[slots]
        hashes = hashes[hashes != 0]
        if len(hashes):
            self._hash_of_slot[slots] = 0
            self._changes.update(dict.fromkeys(hashes.tolist(), False))

    def on_reset(self) -> None:
        self._hash_of_slot[:] = 0
        self._changes.clear()
        self._epoch += 1

    def all_blocks(self) -> KvCacheEvents:
        """For a dispatcher that knows nothing yet. It may get some of them again with the next events."""
        return KvCacheEvents(self._epoch, np.unique(self._hash_of_slot[self._hash_of_slot != 0]).tobytes(), b"")

    def take_events(self) -> KvCacheEvents | None:
        """What has changed since the last call; None: nothing."""
        if not self._changes and self._sent_epoch == self._epoch:
            return None
        changes, self._changes, self._sent_epoch = self._changes, {}, self._epoch
        added = [block for block, is_cached in changes.items() if is_cached]
        evicted = [block for block, is_cached in changes.items() if not is_cached]
        return KvCacheEvents(self._epoch, _bytes(added), _bytes(evicted))


def _hashes_of(req: Req, blocks: int) -> Hashes:
    """Those of the prompt came with the request. Blocks with output tokens follow."""
    if blocks > len(req.block_hashes):
        req.block_hashes = block_hashes(req.token_ids[: blocks * BLOCK_TOKENS], req.salt, req.block_hashes)
    return req.block_hashes


def _bytes(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<i8").tobytes()
