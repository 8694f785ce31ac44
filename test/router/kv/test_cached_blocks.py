"""What the dispatcher hears of the prefix caches of an engine with several attention groups."""

from __future__ import annotations

import numpy as np

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.params import GenerationParams
from lightserve.router.kv.cached_blocks import CachedBlocks
from lightserve.router.kv.pool import KvPool
from lightserve.router.req import Req

LENGTH = 2 * BLOCK_TOKENS


def req_in(pool: KvPool) -> Req:
    """A request of this pool."""
    req = Req(1, np.arange(LENGTH, dtype=np.int32), GenerationParams.of(max_new_tokens=4), 4, ())
    pool.attach_prefix(req)
    return req


def test_a_block_is_cached_until_the_last_group_has_lost_it() -> None:
    pools = [KvPool(LENGTH), KvPool(LENGTH)]
    blocks = CachedBlocks(pools)
    slots = np.arange(LENGTH, dtype=np.int32)
    for pool in pools:
        for listener in pool._listeners:
            listener.on_cached(req_in(pool), slots, 0, LENGTH)
    first = blocks.take_events()
    assert first is not None
    assert len(first.added) == len(blocks.all_blocks().added) == 2 * 8

    pools[0]._listeners[0].on_freed(slots)
    assert blocks.take_events() is None

    pools[1]._listeners[0].on_freed(slots[BLOCK_TOKENS:])
    last = blocks.take_events()
    assert last is not None
    assert (last.added, last.evicted) == (b"", first.added[8:])


def test_all_blocks_are_gone_when_the_groups_lose_their_workers() -> None:
    pools = [KvPool(LENGTH), KvPool(LENGTH)]
    blocks = CachedBlocks(pools)
    pools[0]._listeners[0].on_cached(req_in(pools[0]), np.arange(LENGTH, dtype=np.int32), 0, LENGTH)
    before = blocks.take_events()
    assert before is not None

    for pool in pools:
        pool.reset()

    after = blocks.take_events()
    assert after is not None
    assert after.epoch > before.epoch
    assert after.added == after.evicted == blocks.all_blocks().added == b""
