"""The tables of host memory: one for the pool of all tokens, one for each KV group. A key says which one it is in."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.messages.control import CpuKvSize
from lightserve.router.kv.tiers.cpu_block_table import CpuBlockTable
from lightserve.router.kv.tiers.group_blocks import group_of


class CpuBlockTables:
    """Blocks are numbered from the first one of the first table to the last one of the last table."""

    def __init__(self, size: CpuKvSize) -> None:
        counts = [size.num_blocks, *(group.num_blocks for group in size.groups)]
        self._tables = [CpuBlockTable(count, sum(counts[:number])) for number, count in enumerate(counts)]
        self._bytes = [size.block_bytes, *(group.block_bytes for group in size.groups)]

    @property
    def size(self) -> int:
        """Blocks of the pool of all tokens."""
        return self._tables[0].size

    @property
    def used_bytes(self) -> int:
        return sum(len(table) * size for table, size in zip(self._tables, self._bytes, strict=True))

    def clear(self) -> None:
        for table in self._tables:
            table.clear()

    def __contains__(self, key: bytes) -> bool:
        return key in self._of(key)

    def get(self, key: bytes) -> int | None:
        """The block of this key; None: it is not there."""
        return self._of(key).get(key)

    def put(self, key: bytes) -> int | None:
        """A block for this key, which is new; None: all others are pinned."""
        return self._of(key).put(key)

    def reserve(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """A block for each of the first of these keys, until others are pinned. They hold nothing before ``fill``."""
        blocks: dict[bytes, int] = {}
        for key in keys:
            reserved = self._of(key).reserve(1)
            if not reserved:
                break
            blocks[key] = reserved[0]
        return blocks

    def fill(self, block: int, key: bytes | None) -> None:
        """A reserved block holds this key now; None: it stays empty."""
        self._with(block).fill(block, key)

    def touch(self, key: bytes) -> None:
        """It was used now."""
        self._of(key).touch(key)

    def remove(self, key: bytes) -> None:
        """It is not found any more. Its block is free at once, or when nothing uses it."""
        self._of(key).remove(key)

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of these keys. They keep their content until ``unpin`` is called as often."""
        return [self._of(key).pin([key])[0] for key in keys]

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._with(block).unpin([block])

    @property
    def num_pinned(self) -> int:
        """Blocks whose content something uses."""
        return sum(table.num_pinned for table in self._tables)

    def _of(self, key: bytes) -> CpuBlockTable:
        number = group_of(key)
        return self._tables[0 if number is None else number + 1]

    def _with(self, block: int) -> CpuBlockTable:
        return next(table for table in self._tables if block < table.first + table.size)
