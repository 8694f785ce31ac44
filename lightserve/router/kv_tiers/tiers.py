"""Loads the prefixes of waiting requests from host memory, if that is faster than computing them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightserve.io_struct import HostKvSize, KvLoad, KvLoaded, KvStore
from lightserve.router.kv_pool import KvPool, PrefixLoad, cacheable
from lightserve.router.kv_tiers.gate import LoadGate, Rate
from lightserve.router.kv_tiers.host_blocks import HostBlocks
from lightserve.router.kv_tiers.lower import LowerTierClient, LowerTiers
from lightserve.router.kv_tiers.stored_blocks import StoredBlocks
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait
from lightserve.utils.block_hash import BLOCK_TOKENS

MIN_TOKENS = 32  # of a load: fewer are computed beside other tokens in no time
AHEAD_BYTES = 2**26  # of blocks that a step stores before they are evicted: they cross the bus while it computes


class LoadContext(NamedTuple):
    """When a request asks for its load."""

    now_s: float
    has_room: Callable[[int], bool]  # whether so many slots can be held beside what running requests will need
    is_prefetch: bool = False  # the request could not run yet


@dataclass(slots=True, eq=False)
class Load:
    prefix: PrefixLoad
    keys: list[bytes]  # of the blocks that it loads
    blocks: list[int]  # of host memory
    tokens: int  # that a request need not compute
    wait: Wait  # of requests for its end


class KvTiers:
    """A request waits for its load before it is admitted, up to the time that computing would take.

    The slots of a load belong to no request. When it ends, they enter the prefix cache, where requests find them.
    """

    def __init__(self, pool: KvPool, size: HostKvSize, identity: str = "") -> None:
        """``identity``: of everything that the KV depends on, besides tokens, salt and adapter."""
        computing, host = Rate(), HostBlocks(size.num_blocks)
        self.gate = LoadGate(size.block_bytes // BLOCK_TOKENS, computing)
        self.lower: LowerTiers | None = None
        if size.lower_tiers:
            self.lower = LowerTiers(size.lower_tiers, host, size.block_bytes, computing)
        max_ahead = max(AHEAD_BYTES // size.block_bytes, 1)
        self.stored = StoredBlocks(pool.size, host, identity, self.lower, max_ahead)
        self.num_loaded = 0  # tokens
        self.num_gated = 0  # tokens that were found, and computed because that is faster
        self.num_late = 0  # requests that did not wait until the end of their loads
        self._pool = pool
        self._block_bytes = size.block_bytes
        self._ids = itertools.count()
        self._loads: dict[int, Load] = {}
        self._load_of: dict[bytes, Load] = {}  # by the key of a block
        self._started: list[KvLoad] = []  # that the next step begins
        self._num_clears = 0
        self._clock: Callable[[], float] = time.monotonic
        pool.add_listener(self.stored)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Of the simulator, whose time is not that of the machine."""
        self._clock = clock
        if self.lower is not None:
            self.lower.clock = clock

    def connect(self, client: LowerTierClient | None, wake: Callable[[], None]) -> None:
        """The workers that copy to and from lower tiers. ``wake``: something has changed for waiting requests."""
        if self.lower is not None:
            self.lower.connect(client, wake)

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    @property
    def has_copies(self) -> bool:
        self._notice_clear()
        return bool(self._started) or self.stored.has_stores

    def take_copies(self) -> tuple[list[KvStore], list[KvLoad]]:
        """What the next step stores, and then loads."""
        self._notice_clear()
        started, self._started = self._started, []
        return self.stored.take_stores(), started

    def wait_of(self, req: Req, context: LoadContext) -> Wait | None:
        """What a request waits for before it is admitted: a load of its prefix, which may begin now.

        Loads for requests that could not run yet begin one after the other: they must not delay those of others.
        """
        self._notice_clear()
        if req.loads_checked == req.num_admissions or not req.uses_tiers:
            return None
        if context.is_prefetch and (self._loads or (self.lower is not None and self.lower.is_reading)):
            return None
        return self._wait_for_lower(req, context.now_s) or self._wait_for_load(req, context)

    def finish(self, load_id: int, reply: KvLoaded | None) -> None:
        """A load has ended; None: the workers are lost."""
        self._notice_clear()
        if reply is None or load_id not in self._loads:
            return
        load = self._loads.pop(load_id)
        if reply.is_valid:
            self.gate.observe_load(len(load.prefix.slots), reply.seconds, self._clock())
        self._load_of = {key: other for key, other in self._load_of.items() if other is not load}
        host = self.stored.host
        is_kept = [host.get(key) for key in load.keys] == load.blocks  # if not, it was discarded meanwhile
        is_valid = reply.is_valid and is_kept
        host.unpin(load.blocks)
        self._pool.finish_load(load.prefix, is_valid)
        self.num_loaded += load.tokens if is_valid else 0
        load.wait.end()

    def metrics(self) -> dict[str, dict[str, float]]:
        """By tier."""
        ram = {
            "stored_tokens_total": self.stored.num_stored,
            "hits_total": self.num_loaded,
            "gated_tokens_total": self.num_gated,
            "late_total": self.num_late,
            "used_bytes": len(self.stored.host) * self._block_bytes,
            "load_bytes_per_second": self.gate.bytes_per_second,
        }
        return {"ram": ram} | {tier.name: tier.metrics() for tier in (self.lower.tiers if self.lower else ())}

    def _wait_for_load(self, req: Req, context: LoadContext) -> Wait | None:
        """For the load that brings the next tokens of a request, which may be another's; None: it computes them."""
        cached = self._pool.cached_len(req)
        keys = self._keys_after(req, cached)
        if keys and keys[0] in self._load_of:
            return self._load_of[keys[0]].wait
        found = list(itertools.takewhile(self.stored.host.__contains__, keys))
        begin = cached // BLOCK_TOKENS * BLOCK_TOKENS
        end = begin + len(found) * BLOCK_TOKENS
        if end - cached >= MIN_TOKENS and not context.has_room(end):
            return None  # it does not fit either, most likely, and is asked again
        req.loads_checked = req.num_admissions
        if end - cached < MIN_TOKENS:
            return None
        if not self.gate.allows(end - cached, self._queued_tokens, context.now_s):
            self.num_gated += end - cached
            return None
        return self._start(req, found, begin, cached, context.now_s).wait

    def _keys_after(self, req: Req, cached: int) -> list[bytes]:
        """Of the blocks of a request that are not in the pool, if so many tokens are."""
        return self.stored.keys_of(req, len(cacheable(req)))[cached // BLOCK_TOKENS :]

    def _wait_for_lower(self, req: Req, now_s: float) -> Wait | None:
        if self.lower is None or req.lora_id is not None:
            return None

        def missing() -> list[bytes]:
            host = self.stored.host
            keys = self._keys_after(req, self._pool.cached_len(req))[: host.size]  # the first ones must not make room
            return list(itertools.dropwhile(host.__contains__, keys))

        return self.lower.wait_of(req, missing, now_s)

    @property
    def _queued_tokens(self) -> int:
        return sum(len(load.prefix.slots) for load in self._loads.values())

    def _start(self, req: Req, found: list[bytes], begin: int, cached: int, now_s: float) -> Load:
        end = begin + len(found) * BLOCK_TOKENS
        blocks = self.stored.host.pin(found)  # first: the slots may come from an eviction, which needs host memory
        prefix = self._pool.start_load(req, begin, end)
        wait = Wait(self.gate.deadline_s(end - cached, now_s), self._on_late)
        load = Load(prefix, found, blocks, end - cached, wait)
        load_id = next(self._ids)
        self._loads[load_id] = load
        self._load_of |= dict.fromkeys(found, load)
        self._started.append(KvLoad(load_id, np.array(blocks, dtype=np.int32), prefix.slots))
        return load

    def _on_late(self, req: Req) -> None:
        req.loads_checked = req.num_admissions
        self.num_late += 1

    def _notice_clear(self) -> None:
        """After all KV was lost, no load is left."""
        if self._num_clears != self.stored.num_clears:
            self._num_clears = self.stored.num_clears
            self._loads.clear()
            self._load_of.clear()
            self._started.clear()
