"""Whoever listens to the KV pool knows which slots the prefix cache owns, whatever happens to requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lightserve.messages.step import ReqFailed
from lightserve.router.kv.pool import KvPool
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.slots import Slots
from lightserve.router.req import Req
from test.router.scheduler.test_scheduler import Server, _cached_nodes, make, make_req


class OwnedSlots(PoolListener):
    """The slots of the cache, as a listener hears of them."""

    def __init__(self, pool: KvPool) -> None:
        self.owned: set[int] = set()
        self.evicted: set[int] = set()
        self.discarded: list[int] = []
        self._pool = pool
        pool.add_listener(self)

    def on_cached(self, req: Req, slots: Slots, begin: int, end: int) -> None:
        cached = self._pool._cache.find_slots(req.token_ids[:end], req.salt)
        assert np.array_equal(slots[:end], cached), "the slots of the first tokens are not those of the cache"
        self.owned.update(slots[begin:end].tolist())

    def on_evicted(self, slots: Slots) -> None:
        assert self.owned.issuperset(slots.tolist()), "slots are evicted that the cache does not own"
        self.evicted.update(slots.tolist())

    def on_freed(self, slots: Slots) -> None:
        self.owned.difference_update(slots.tolist())

    def on_discarded(self, req: Req) -> None:
        self.discarded.append(req.req_id)

    def on_reset(self) -> None:
        self.owned.clear()

    def check(self) -> None:
        assert self.owned == {slot for node in _cached_nodes(self._pool) for slot in node.slots.tolist()}


@pytest.mark.parametrize("seed", range(4))
def test_a_listener_knows_the_slots_of_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(300, max_running=4)
    listener, server = OwnedSlots(scheduler.only_group.pool), Server(scheduler, depth=2)

    for req_id in range(40):
        prompt = [1] * rng.randrange(60) + [rng.randrange(3) for _ in range(20)]
        scheduler.add(make_req(req_id, prompt, rng.randrange(1, 20), salt=rng.choice(["", "other"])))
        server.step()
        listener.check()
        if rng.random() < 0.2:
            scheduler.abort(req_id - 2)
        if rng.random() < 0.1 and scheduler.num_running:
            scheduler.only_group.preemption.preempt_newest()
        listener.check()
    while server.step():
        listener.check()

    assert listener.evicted, "the pool was large enough for everything"
    assert listener.owned


def test_a_listener_hears_of_kv_that_may_be_wrong_and_of_lost_kv() -> None:
    scheduler = make()
    listener, server = OwnedSlots(scheduler.only_group.pool), Server(scheduler)
    scheduler.add(make_req(1, [1] * 20, 8))
    scheduler.add(make_req(2, [2] * 20, 8))
    server.step()

    scheduler.next_step()
    scheduler.fail(ReqFailed(1, 500, "not finite"))

    assert listener.discarded == [1]
    listener.check()
    server.crash()
    assert not listener.owned
