"""Which blocks of tokens are in host memory, in which of its blocks. The least recently used one makes room."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class CpuBlockTable:
    def __init__(self, size: int, first: int = 0) -> None:
        """``first``: the number of its first block."""
        self.size = size
        self.first = first
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self.first + self.size - 1, self.first - 1, -1))
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # by key, the least recently used first
        self._pins: Counter[int] = Counter()  # by block
        self._removed: set[int] = set()  # pinned blocks whose keys were removed

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def get(self, key: bytes) -> int | None:
        """The block of this key; None: it is not there."""
        return self._block_of.get(key)

    def put(self, key: bytes) -> int | None:
        """A block for this key, which is new; None: all others are pinned."""
        if not self._free and not self._evict():
            return None
        self._block_of[key] = self._free.pop()
        return self._block_of[key]

    def reserve(self, count: int) -> list[int]:
        """So many blocks, or fewer if others are pinned. They hold nothing before ``fill``."""
        blocks: list[int] = []
        while len(blocks) < count and (self._free or self._evict()):
            blocks.append(self._free.pop())
        return blocks

    def fill(self, block: int, key: bytes | None) -> None:
        """A reserved block holds this key now; None: it stays empty."""
        if key is None or key in self._block_of:
            self._free.append(block)
        else:
            self._block_of[key] = block

    def touch(self, key: bytes) -> None:
        """It was used now."""
        self._block_of.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """It is not found any more. Its block is free at once, or when nothing uses it."""
        block = self._block_of.pop(key, None)
        if block is None:
            return
        if self._pins[block]:
            self._removed.add(block)
        else:
            self._free.append(block)

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of these keys. They keep their content until ``unpin`` is called as often."""
        blocks = [self._block_of[key] for key in keys]
        for key, block in zip(keys, blocks, strict=True):
            self._pins[block] += 1
            self.touch(key)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block] and block in self._removed:
                self._removed.discard(block)
                self._free.append(block)

    @property
    def num_pinned(self) -> int:
        return len(+self._pins)

    def _evict(self) -> bool:
        oldest = next((key for key, block in self._block_of.items() if not self._pins[block]), None)
        if oldest is None:
            return False
        self.remove(oldest)
        return True
