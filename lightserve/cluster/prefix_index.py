"""Which engine has which prefix in its cache, as hashes of blocks (messages/block_hash.py).

An entry has one of two sources. The engine itself says which blocks it has cached and evicted (``KvCacheEvents``). And
the dispatcher presumes that an engine has the prompts of the requests that it has there: it will compute them before a
later request needs them. A presumption ends with its request, so a block that was never computed leaves nothing behind.

All KV of an engine is lost when its workers die. The engine then begins a new epoch, and its old entries are dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.cluster import KvCacheEvents


class _EngineBlocks:
    __slots__ = ("cached", "epoch", "presumed")

    def __init__(self) -> None:
        self.epoch = 0
        self.cached: set[int] = set()
        self.presumed: Counter[int] = Counter()  # how many open requests have the block

    def __contains__(self, block: int) -> bool:
        return block in self.cached or block in self.presumed


class PrefixIndex:
    """Blocks of an engine that is not in the index are unknown."""

    def __init__(self) -> None:
        self._engines: dict[int, _EngineBlocks] = {}

    def add_engine(self, engine: int) -> None:
        """An engine starts with an empty cache."""
        self._engines[engine] = _EngineBlocks()

    def remove_engine(self, engine: int) -> None:
        self._engines.pop(engine, None)

    def num_blocks(self, engine: int) -> int:
        blocks = self._engines.get(engine)
        return 0 if blocks is None else len(blocks.cached | blocks.presumed.keys())

    def apply(self, engine: int, events: KvCacheEvents) -> None:
        added, evicted = (np.frombuffer(raw, dtype="<i8").tolist() for raw in (events.added, events.evicted))
        self.update(engine, events.epoch, added, evicted)

    def update(self, engine: int, epoch: int, added: Sequence[int], evicted: Sequence[int]) -> None:
        """What the engine says about its cache. Events of an epoch that is over are ignored."""
        blocks = self._engines.get(engine)
        if blocks is None or epoch < blocks.epoch:
            return
        if epoch > blocks.epoch:
            blocks.epoch = epoch
            blocks.cached.clear()
        blocks.cached.difference_update(evicted)
        blocks.cached.update(added)

    def presume(self, engine: int, hashes: Sequence[int]) -> None:
        """A request with this prompt was sent to the engine. Call ``end_presumption`` when it ends there."""
        blocks = self._engines.get(engine)
        if blocks is not None:
            blocks.presumed.update(hashes)

    def end_presumption(self, engine: int, hashes: Sequence[int]) -> None:
        blocks = self._engines.get(engine)
        if blocks is None:
            return
        presumed = blocks.presumed
        for block in hashes:
            left = presumed[block] - 1
            if left > 0:
                presumed[block] = left
            else:
                del presumed[block]  # a Counter ignores what it does not have

    def cached_tokens(self, engine: int, hashes: Sequence[int]) -> int:
        """How many of the first tokens of a prompt the engine has.

        If an engine has a block, it has those before it too: caches evict the end of a prefix first. So a binary search
        finds the end.
        """
        blocks = self._engines.get(engine)
        if blocks is None:
            return 0
        return BLOCK_TOKENS * bisect_left(range(len(hashes)), True, key=lambda at: hashes[at] not in blocks)
