"""Which blocks of tokens are in the prefix cache, with the slots of all their tokens.

A block is whole as long as the cache owns the slot of its last token: prefixes lose their ends first. So whoever evicts
that slot finds the block here, and all its other tokens still in their slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightserve.common.kv.token_slots import Slots
from lightserve.utils.block_hash import BLOCK_TOKENS


class PoolBlock(NamedTuple):
    key: bytes
    slots: Slots
    is_local: bool  # it means something else in another process


class PoolBlocks:
    def __init__(self, num_slots: int) -> None:
        self._is_last = np.zeros(num_slots, dtype=np.bool_)  # whether a block ends in this slot
        self._blocks: dict[int, PoolBlock] = {}  # by that slot

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, last_slot: int) -> PoolBlock | None:
        return self._blocks.get(last_slot)

    def add(self, keys: list[bytes], slots: Slots, is_local: bool) -> list[int]:
        """The cache owns these slots, block after block. Returns the last slot of each block."""
        for key, own in zip(keys, slots.reshape(-1, BLOCK_TOKENS), strict=True):
            last = own.item(BLOCK_TOKENS - 1)
            self._is_last[last] = True
            self._blocks[last] = PoolBlock(key, own, is_local)
        last_slots: list[int] = slots[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].tolist()
        return last_slots

    def take(self, slots: Slots) -> list[PoolBlock]:
        """The cache does not own these slots any more, if it ever did. Returns the blocks that end in them."""
        last = slots[self._is_last[slots]]
        self._is_last[last] = False
        return [self._blocks.pop(slot) for slot in last.tolist()]

    def clear(self) -> None:
        self._is_last[:] = False
        self._blocks.clear()
