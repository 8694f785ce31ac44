"""Which blocks of tokens are in the prefix cache, with the slots of all their tokens.

A block is whole as long as the cache owns the slot of its last token: prefixes lose their ends first. So whoever evicts
that slot finds the block here, and all its other tokens still in their slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.router.kv.slots import Slots


class PoolBlock(NamedTuple):
    key: bytes
    slots: Slots
    is_local: bool  # it means something else in another process

    @property
    def last_slot(self) -> int:
        return self.slots.item(-1)


class PoolBlockTable:
    def __init__(self, num_slots: int) -> None:
        self._is_last = np.zeros(num_slots, dtype=np.bool_)  # whether a block ends in this slot
        self._blocks: dict[int, PoolBlock] = {}  # by that slot

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: PoolBlock) -> bool:
        """Whether this very block is still there. Another one may end in the same slot by now."""
        return self._blocks.get(block.last_slot) is block

    def add(self, keys: list[bytes], slots: Slots, is_local: bool) -> list[PoolBlock]:
        """The cache owns these slots, block after block."""
        by_block = zip(keys, slots.reshape(-1, BLOCK_TOKENS), strict=True)
        blocks = [PoolBlock(key, block_slots, is_local) for key, block_slots in by_block]
        self._blocks |= {block.last_slot: block for block in blocks}
        self._is_last[slots[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]] = True
        return blocks

    def take(self, slots: Slots) -> list[PoolBlock]:
        """The cache does not own these slots any more, if it ever did. Returns the blocks that end in them."""
        last = slots[self._is_last[slots]]
        self._is_last[last] = False
        return [self._blocks.pop(slot) for slot in last.tolist()]

    def clear(self) -> None:
        self._is_last[:] = False
        self._blocks.clear()
