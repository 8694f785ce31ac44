"""Blocks are stored in host memory before they are evicted, or at the latest then."""

from __future__ import annotations

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.router.kv.tiers.gate import Rate
from lightserve.router.kv.tiers.host_blocks import HostBlocks
from lightserve.router.kv.tiers.lower import LowerTiers
from lightserve.router.kv.tiers.stored_blocks import StoredBlocks
from lightserve.router.req import Req
from test.router.scheduler.test_scheduler import make_req

SLOTS = np.arange(8 * BLOCK_TOKENS, dtype=np.int32)


def no_lower_tiers() -> LowerTiers:
    return LowerTiers((), HostBlocks(16), block_bytes=6400, computing=Rate())


def one(first_token: int) -> Req:
    """A request with eight blocks."""
    return make_req(1, list(range(first_token, first_token + len(SLOTS))))


def blocks(first: int, end: int) -> np.ndarray:
    return SLOTS[first * BLOCK_TOKENS : end * BLOCK_TOKENS]


def test_the_oldest_blocks_are_stored_a_few_at_a_time_before_they_are_evicted() -> None:
    stored = StoredBlocks(len(SLOTS), no_lower_tiers(), max_ahead=3)
    stored.on_cached(one(0), SLOTS, 0, len(SLOTS))
    stored.begin_step()
    stores = []

    for _ in range(4):
        stored.store_ahead()
        stores += stored.take_stores()

    assert [store.slots.tolist() for store in stores] == [blocks(0, 3).tolist(), blocks(3, 4).tolist()]
    stored.finish_stores(stores)
    stored.on_evicted(blocks(2, 4))
    assert not stored.has_stores
    stored.on_evicted(blocks(0, 2))
    stored.on_evicted(blocks(4, 5))
    assert [store.slots.tolist() for store in stored.take_stores()] == [blocks(4, 5).tolist()]


def test_a_block_that_was_evicted_meanwhile_is_not_stored_again() -> None:
    stored = StoredBlocks(len(SLOTS), no_lower_tiers(), max_ahead=8)
    stored.on_cached(one(0), SLOTS, 0, len(SLOTS))
    stored.begin_step()
    stored.on_evicted(blocks(1, 2))
    assert len(stored.take_stores()) == 1

    stored.store_ahead()

    assert [store.blocks.size for store in stored.take_stores()] == [3]


def test_a_step_stores_no_block_that_it_computes_itself() -> None:
    """The worker stores before it computes. A block may end in the slot of an evicted one that is still queued."""
    stored = StoredBlocks(len(SLOTS), no_lower_tiers(), max_ahead=8)
    stored.on_cached(one(0), SLOTS, 0, len(SLOTS))
    stored.begin_step()
    stored.on_evicted(SLOTS)
    stored.take_stores()

    stored.on_cached(one(1000), SLOTS, 0, len(SLOTS))
    stored.store_ahead()
    assert not stored.has_stores

    stored.begin_step()
    stored.store_ahead()
    assert [store.blocks.size for store in stored.take_stores()] == [4]
