"""Blocks of tokens that leave the prefix cache: they are stored in host memory on their way out, or shortly before.

Blocks of KV groups are stored as soon as they are computed: their pools lose them earlier, and only a few are stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS, block_keys
from lightserve.messages.int_arrays import NO_INT32, int32s
from lightserve.messages.step import KvStore
from lightserve.router.kv.group_pool import KvGroupPool
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.tiers.group_blocks import group_key, group_of
from lightserve.router.kv.tiers.pool_block_table import PoolBlock, PoolBlockTable
from lightserve.router.kv.tiers.storage import MAX_FLUSH, StorageTiers
from lightserve.router.req import Req

RECENT = 0.5  # of the pool's blocks: so many that were computed last are not stored ahead of their eviction


class OffloadedBlock(NamedTuple):
    """A block that a step stores."""

    block: PoolBlock
    cpu_block: int  # of host memory
    stays_in_pool: bool = False


class GroupBlock(NamedTuple):
    """The part of a block that a KV group has."""

    block: PoolBlock  # of all tokens
    number: int  # of the group


class OffloadQueue(PoolListener):
    def __init__(
        self,
        num_slots: int,
        storage: StorageTiers,
        identity: str = "",
        max_ahead: int = 0,
        groups: Sequence[KvGroupPool] = (),
    ) -> None:
        """``identity``: of everything that the KV depends on, besides tokens, salt and adapter.

        ``max_ahead``: blocks that a step stores before they are evicted. ``groups``: KV groups with pools.
        """
        self._groups = groups
        self.host = storage.host
        self._max_ahead = max_ahead
        self._num_recent = int(num_slots // BLOCK_TOKENS * RECENT)
        self.num_stored = 0  # tokens
        self._num_stores = 0
        self._identity = identity
        self._storage = storage
        self._pool = PoolBlockTable(num_slots)
        self._queued: list[OffloadedBlock] = []  # blocks that the next step stores
        self._storing: dict[int, OffloadedBlock] = {}  # that steps in flight store, by place
        self._new: deque[PoolBlock] = deque(maxlen=2 * num_slots // BLOCK_TOKENS + 1)  # the oldest first
        self._planned: list[PoolBlock] = []  # newer ones, which the step that is being planned may compute
        self._new_of_groups: deque[GroupBlock] = deque()
        self._planned_of_groups: list[GroupBlock] = []

    @property
    def has_stores(self) -> bool:
        return bool(self._queued)

    @property
    def has_work(self) -> bool:
        """Whether a step that only decodes may store something, or one in flight does."""
        is_storing = self._queued or self._storing or self._new_of_groups or self._planned_of_groups
        return bool(is_storing) or len(self._new) + len(self._planned) > self._num_recent

    def keys_of(self, req: Req, end: int) -> list[bytes]:
        """The keys of all whole blocks before ``end``."""
        count = end // BLOCK_TOKENS
        if count > len(req.kv_keys):
            ids = req.token_ids[: count * BLOCK_TOKENS]
            req.kv_keys = block_keys(ids, f"{self._identity} {req.salt}", req.kv_keys)
        return req.kv_keys[:count]

    def on_cached(self, req: Req, slots: Slots, begin: int, end: int) -> None:
        first, last = begin // BLOCK_TOKENS, end // BLOCK_TOKENS
        if req.uses_tiers and last > first:
            whole = np.array(slots[first * BLOCK_TOKENS : last * BLOCK_TOKENS], dtype=np.int32)
            self._planned += self._pool.add(self.keys_of(req, end)[first:], whole)
        if req.uses_tiers and self._groups:
            self._add_of_groups(req, slots, begin, end)

    def _add_of_groups(self, req: Req, slots: Slots, begin: int, end: int) -> None:
        """Where others are likely to continue: at the end of the prompt or of the request, or where one had to."""
        branches = {end // BLOCK_TOKENS} if end >= len(req.prompt_ids) else set()
        if begin < req.branch_len <= end:
            branches.add(req.branch_len // BLOCK_TOKENS)
        for branch in sorted(branches):
            for number, group in enumerate(self._groups):
                first = max(branch - group.blocks_before - 1, 0)  # one more: the last tokens may be written differently
                blocks = self._pool.ending_in(slots[first * BLOCK_TOKENS : branch * BLOCK_TOKENS])
                self._planned_of_groups += [GroupBlock(block, number) for block in blocks]

    def begin_step(self) -> None:
        """The rows of a step are planned now. It stores before it computes, so it cannot store what is added from here.

        What was added before is computed by earlier steps, which the workers launch first.
        """
        self._new += self._planned
        self._planned.clear()
        for group in self._groups:
            group.writes = NO_INT32
        self._new_of_groups += self._planned_of_groups
        self._planned_of_groups.clear()

    def on_evicted(self, slots: Slots) -> None:
        """Blocks that end in these slots are stored by the next step, before it writes any."""
        for block in reversed(self._pool.take(slots)):  # ends come first: the beginning of a prefix is used last
            if block.key in self.host:
                self.host.touch(block.key)
            else:
                self._store(block)

    def store_idle(self) -> None:
        """Store some blocks that stay in the pool, for the tiers below: they would be lost with the worker."""
        storage = self._storage
        if storage.client is None or storage.is_flushing or self._storing:
            return
        while self._new and len(self._queued) < MAX_FLUSH:
            block = self._new.popleft()
            if block not in self._pool or storage.is_saved(block.key):
                continue
            if block.key in self.host:
                storage.save(block.key)
            else:
                self._store(block, stays_in_pool=True)

    def write_back(self) -> None:
        """Store some of the oldest blocks with the next step: a load that evicts them later does not wait for that."""
        most = len(self._queued) + self._max_ahead
        while len(self._new) > self._num_recent and len(self._queued) < most:
            block = self._new.popleft()
            if block not in self._pool:
                continue
            if block.key not in self.host:
                self._store(block, stays_in_pool=True)
            elif not self._storage.is_saved(block.key):
                self._storage.save(block.key)

    def store_groups(self) -> None:
        """Store blocks of KV groups with the next step, unless they have lost their slots already."""
        most = len(self._queued) + max(self._max_ahead, 1)
        while self._new_of_groups and len(self._queued) < most:
            block, number = self._new_of_groups.popleft()
            group, key = self._groups[number], group_key(block.key, number)
            if block not in self._pool or not group.has_blocks(block.slots[None])[0]:
                continue
            slots = group.block_slots(block.slots)
            if key in self.host:
                self.host.touch(key)
            elif np.isin(slots, group.writes).any():  # it lost them, and this step computes them again
                self._planned_of_groups.append(GroupBlock(block, number))
            else:
                self._store(PoolBlock(key, slots))

    def _store(self, block: PoolBlock, stays_in_pool: bool = False) -> None:
        cpu_block = self.host.put(block.key)
        if cpu_block is None:
            return
        self.host.pin([block.key])  # until the step is back: nothing else may use the place before
        self._queued.append(OffloadedBlock(block, cpu_block, stays_in_pool))
        self.num_stored += BLOCK_TOKENS if group_of(block.key) is None else 0

    def take_stores(self) -> list[KvStore]:
        """What the next step stores."""
        queued, self._queued = self._queued, []
        if not queued:
            return []
        self._storing |= {offloaded.cpu_block: offloaded for offloaded in queued}
        by_group: dict[int | None, list[OffloadedBlock]] = {}
        for offloaded in queued:
            by_group.setdefault(group_of(offloaded.block.key), []).append(offloaded)
        return [self._as_store(of_group) for of_group in by_group.values()]

    def _as_store(self, queued: list[OffloadedBlock]) -> KvStore:
        """Of blocks of one pool."""
        slots = np.concatenate([offloaded.block.slots for offloaded in queued])
        self._num_stores += 1
        return KvStore(slots, int32s([offloaded.cpu_block for offloaded in queued]), self._num_stores)

    def finish_stores(self, stores: list[KvStore]) -> None:
        """The step that stores these is back."""
        if stores and self._storing:
            self._storage.last_store = max(store.store_id for store in stores)
        for cpu_block in (cpu_block for store in stores for cpu_block in store.blocks.tolist()):
            offloaded = self._storing.pop(cpu_block, None)
            if offloaded is None:  # all KV was lost meanwhile
                continue
            key = offloaded.block.key
            self.host.unpin([cpu_block])
            if self.host.get(key) == cpu_block:
                self._storage.save(key, offloaded.stays_in_pool)

    def on_freed(self, slots: Slots) -> None:
        self._pool.free(slots)

    def on_discarded(self, req: Req) -> None:
        keys = self.keys_of(req, req.total_len)
        keys = [*keys, *(group_key(key, number) for number in range(len(self._groups)) for key in keys)]
        for key in keys:
            self.host.remove(key)
        self._storage.discard(keys)

    def on_steps_failed(self) -> None:
        """What is stored may contain what they should have computed."""
        self.on_reset()

    def on_reset(self) -> None:
        self.host.clear()
        self._pool.clear()
        self._queued.clear()
        self._storing.clear()
        self._new.clear()
        self._planned.clear()
        self._new_of_groups.clear()
        self._planned_of_groups.clear()
        self._storage.clear()
