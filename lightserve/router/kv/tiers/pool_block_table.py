"""Which blocks of tokens are in the prefix cache, with the slots of all their tokens.

A block is whole as long as the cache owns the slot of its last token: prefixes lose their ends first. So whoever evicts
that slot finds the block here, and all its other tokens still in their slots. With KV groups, the cache may move the
first tokens of a block to other slots; such a block is not whole any more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.router.kv.slots import Slots


class PoolBlock(NamedTuple):
    key: bytes
    slots: Slots
    num_freed: int = 0  # how often its slots had been freed when the cache got them

    @property
    def last_slot(self) -> int:
        return self.slots.item(-1)


class PoolBlockTable:
    def __init__(self, num_slots: int) -> None:
        self._is_last = np.zeros(num_slots, dtype=np.bool_)  # whether a block ends in this slot
        self._num_freed = np.zeros(num_slots, dtype=np.int64)
        self._blocks: dict[int, PoolBlock] = {}  # by that slot

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: PoolBlock) -> bool:
        """Whether this very block is still there, and whole. Another one may end in the same slot by now."""
        return self._blocks.get(block.last_slot) is block and self._is_whole(block)

    def _is_whole(self, block: PoolBlock) -> bool:
        return int(self._num_freed[block.slots].sum()) == block.num_freed

    def add(self, keys: list[bytes], slots: Slots) -> list[PoolBlock]:
        """The cache owns these slots, block after block."""
        by_block = slots.reshape(-1, BLOCK_TOKENS)
        num_freed = self._num_freed[by_block].sum(axis=1).tolist()
        blocks = [
            PoolBlock(key, block_slots, count)
            for key, block_slots, count in zip(keys, by_block, num_freed, strict=True)
        ]
        self._blocks |= {block.last_slot: block for block in blocks}
        self._is_last[slots[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]] = True
        return blocks

    def ending_in(self, slots: Slots) -> list[PoolBlock]:
        """The blocks that end in these slots, in their order."""
        return [self._blocks[slot] for slot in slots[self._is_last[slots]].tolist()]

    def take(self, slots: Slots) -> list[PoolBlock]:
        """The cache will not own these slots any more, if it ever did. Returns the whole blocks that end in them."""
        last = slots[self._is_last[slots]]
        self._is_last[last] = False
        return [block for slot in last.tolist() if self._is_whole(block := self._blocks.pop(slot))]

    def free(self, slots: Slots) -> None:
        """The cache does not own these slots any more."""
        self.take(slots)
        self._num_freed[slots] += 1

    def clear(self) -> None:
        self._is_last[:] = False
        self._blocks.clear()
