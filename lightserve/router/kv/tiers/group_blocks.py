"""Blocks of KV groups in slower memory. A block there is (key, group): one of all tokens, and some of groups.

Of a group, only the blocks are stored with which prefixes are likely to be continued: the last ones of a prompt, and of
a request that has ended. What a window has let go is not needed. So a prefix can be loaded up to a place where every
group has the blocks that the next token reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS, KEY_BYTES
from lightserve.router.kv.group_pool import KvGroupPool
from lightserve.router.kv.pool import CachedPrefix

IsThere = Callable[[bytes], bool]


def group_key(key: bytes, number: int) -> bytes:
    """Of the block of this KV group."""
    return key + bytes([number])


def group_of(key: bytes) -> int | None:
    """None: it is a block of the pool of all tokens."""
    return key[-1] if len(key) > KEY_BYTES else None


class LoadPlan(NamedTuple):
    """Blocks of a prefix that slower memory has, by their numbers."""

    begin: int
    end: int  # those from ``begin`` to here go to the pool of all tokens
    groups: tuple[tuple[int, ...], ...] = ()  # those that go to the pool of each KV group

    def keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """``keys``: of all blocks of the request."""
        of_groups = [group_key(keys[block], number) for number, blocks in enumerate(self.groups) for block in blocks]
        return [*keys[self.begin : self.end], *of_groups]


class PrefixBlocks:
    """Which blocks of a request's prefix a load needs."""

    def __init__(self, groups: Sequence[KvGroupPool], keys: Sequence[bytes], prefix: CachedPrefix) -> None:
        self._keys = keys
        self._needed = [group.blocks_before for group in groups]
        # with groups, more may be cached than is usable
        self.num_cached = (len(prefix.slots) if groups else prefix.usable_len) // BLOCK_TOKENS
        self._first = prefix.usable_len // BLOCK_TOKENS
        tokens = prefix.slots[: self.num_cached * BLOCK_TOKENS].reshape(-1, BLOCK_TOKENS)
        self._are_pooled = [group.has_blocks(tokens) for group in groups]

    def longest_load(self, is_there: IsThere) -> LoadPlan | None:
        """The longest prefix that blocks which are there complete; None: none is longer than what is usable."""
        end = self.reachable(is_there)
        if not self._needed:
            return LoadPlan(self._first, end) if end > self._first else None
        has = [self._present(number, end, is_there) for number in range(len(self._needed))]
        for last in range(end, self._first, -1):
            if all(present[self._window(number, last)].all() for number, present in enumerate(has)):
                return LoadPlan(min(self.num_cached, last), last, self._missing(last))
        return None

    def reachable(self, is_there: IsThere) -> int:
        """So many first blocks are in the pool of all tokens, or there."""
        return self.num_cached + sum(1 for _ in takewhile(is_there, self._keys[self.num_cached :]))

    def unpooled(self) -> list[bytes]:
        """The keys of all blocks that a load may need."""
        wanted = list(self._keys[self.num_cached :])
        for number, needed in enumerate(self._needed):
            blocks = range(max(self._first + 1 - needed, 0), len(self._keys))
            wanted += [group_key(self._keys[block], number) for block in blocks if not self._is_pooled(number, block)]
        return wanted

    def _window(self, number: int, end: int) -> slice:
        return slice(max(end - self._needed[number], 0), end)

    def _missing(self, end: int) -> tuple[tuple[int, ...], ...]:
        """Blocks that each group needs to continue there, and does not have."""
        return tuple(
            tuple(block for block in range(end)[self._window(number, end)] if not self._is_pooled(number, block))
            for number in range(len(self._needed))
        )

    def _is_pooled(self, number: int, block: int) -> bool:
        return block < self.num_cached and bool(self._are_pooled[number][block])

    def _present(self, number: int, end: int, is_there: IsThere) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of the first blocks of a group: whether they are in its pool, or there."""
        keys = (group_key(key, number) for key in self._keys[:end])
        return np.array(
            [self._is_pooled(number, block) or is_there(key) for block, key in enumerate(keys)], dtype=np.bool_
        )
