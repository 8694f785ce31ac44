"""Blocks are stored in host memory before they are evicted, or at the latest then."""

from __future__ import annotations

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import CpuKvSize
from lightserve.router.kv.tiers.cpu_block_tables import CpuBlockTables
from lightserve.router.kv.tiers.load_or_recompute import Rate
from lightserve.router.kv.tiers.offload_queue import OffloadQueue
from lightserve.router.kv.tiers.storage import StorageTiers
from lightserve.router.req import Req
from test.router.scheduler.test_scheduler import make_req

SLOTS = np.arange(8 * BLOCK_TOKENS, dtype=np.int32)


def no_storage_tiers() -> StorageTiers:
    return StorageTiers((), CpuBlockTables(CpuKvSize(16, 6400)), block_bytes=6400, computing=Rate())


def one(first_token: int) -> Req:
    """A request with eight blocks."""
    return make_req(1, list(range(first_token, first_token + len(SLOTS))))


def blocks(first: int, end: int) -> np.ndarray:
    return SLOTS[first * BLOCK_TOKENS : end * BLOCK_TOKENS]


def test_the_oldest_blocks_are_stored_a_few_at_a_time_before_they_are_evicted() -> None:
    queue = OffloadQueue(len(SLOTS), no_storage_tiers(), max_ahead=3)
    queue.on_cached(one(0), SLOTS, 0, len(SLOTS))
    queue.begin_step()
    stores = []

    for _ in range(4):
        queue.write_back()
        stores += queue.take_stores()

    assert [store.slots.tolist() for store in stores] == [blocks(0, 3).tolist(), blocks(3, 4).tolist()]
    queue.finish_stores(stores)
    queue.on_evicted(blocks(2, 4))
    assert not queue.has_stores
    queue.on_evicted(blocks(0, 2))
    queue.on_evicted(blocks(4, 5))
    assert [store.slots.tolist() for store in queue.take_stores()] == [blocks(4, 5).tolist()]


def test_a_block_that_was_evicted_meanwhile_is_not_stored_again() -> None:
    queue = OffloadQueue(len(SLOTS), no_storage_tiers(), max_ahead=8)
    queue.on_cached(one(0), SLOTS, 0, len(SLOTS))
    queue.begin_step()
    queue.on_evicted(blocks(1, 2))
    assert len(queue.take_stores()) == 1

    queue.write_back()

    assert [store.blocks.size for store in queue.take_stores()] == [3]


def test_a_step_stores_no_block_that_it_computes_itself() -> None:
    """The worker stores before it computes. A block may end in the slot of an evicted one that is still queued."""
    queue = OffloadQueue(len(SLOTS), no_storage_tiers(), max_ahead=8)
    queue.on_cached(one(0), SLOTS, 0, len(SLOTS))
    queue.begin_step()
    queue.on_evicted(SLOTS)
    queue.take_stores()

    queue.on_cached(one(1000), SLOTS, 0, len(SLOTS))
    queue.write_back()
    assert not queue.has_stores

    queue.begin_step()
    queue.write_back()
    assert [store.blocks.size for store in queue.take_stores()] == [4]
