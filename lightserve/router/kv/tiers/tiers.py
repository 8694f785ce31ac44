"""Loads the prefixes of waiting requests from host memory, if that is faster than computing them."""

from __future__ import annotations

import itertools
import time
from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightserve.ipc.worker_calls import WAIT_FOR_LOAD
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import CpuKvSize
from lightserve.messages.step import KvLoad, Step
from lightserve.messages.worker_calls import KvLoaded
from lightserve.router.kv.pool import KvPool, PrefixLoad, cacheable
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.source import Activity, KvSource, KvTransfers, KvWorkers, LoadContext
from lightserve.router.kv.tiers.cpu_block_table import CpuBlockTable
from lightserve.router.kv.tiers.load_or_recompute import LoadOrRecompute, Rate
from lightserve.router.kv.tiers.offload_queue import OffloadQueue
from lightserve.router.kv.tiers.storage import StorageTiers
from lightserve.router.observability.stats import RouterMetrics
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait

MIN_TOKENS = 32  # of a load: fewer are computed beside other tokens in no time
AHEAD_BYTES = 2**26  # of blocks that a step stores before they are evicted: they cross the bus while it computes


@dataclass(slots=True, eq=False)
class Load:
    prefix: PrefixLoad
    keys: list[bytes]  # of the blocks that it loads
    blocks: list[int]  # of host memory
    tokens: int  # that a request need not compute
    wait: Wait  # of requests for its end


class KvTiers(KvSource, PoolListener):
    """A request waits for its load before it is admitted, up to the time that computing would take.

    The slots of a load belong to no request. When it ends, they enter the prefix cache, where requests find them.
    """

    def __init__(self, pool: KvPool, size: CpuKvSize, identity: str = "") -> None:
        """``identity``: of everything that the KV depends on, besides tokens, salt and adapter."""
        computing, host = Rate(), CpuBlockTable(size.num_blocks)
        self.load_policy = LoadOrRecompute(size.block_bytes // BLOCK_TOKENS, computing)
        self.storage = StorageTiers(size.storage_tiers, host, size.block_bytes, computing)
        max_ahead = max(AHEAD_BYTES // size.block_bytes, 1)
        self.offload_queue = OffloadQueue(pool.size, self.storage, identity, max_ahead)
        self.num_loaded = 0  # tokens
        self.num_recomputed = 0  # tokens that were found, and computed because that is faster
        self.num_late = 0  # requests that did not wait until the end of their loads
        self._pool = pool
        self._block_bytes = size.block_bytes
        self._ids = itertools.count()
        self._loads: dict[int, Load] = {}
        self._load_of: dict[bytes, Load] = {}  # by the key of a block
        self._started: list[KvLoad] = []  # that the next step begins
        self._wake: Callable[[], None] = lambda: None
        self._clock: Callable[[], float] = time.monotonic
        pool.add_listener(self.offload_queue)
        pool.add_listener(self)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Of the simulator, whose time is not that of the machine."""
        self._clock = self.storage.clock = clock

    def connect(self, workers: KvWorkers, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.storage.connect(workers.storage_tiers, wake)

    def begin_step(self) -> None:
        self.offload_queue.begin_step()

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        """The step stores, and then loads."""
        if activity is Activity.COMPUTING:
            self.offload_queue.write_back()
        elif activity is Activity.IDLE:
            self.offload_queue.store_idle()
        transfers.stores += self.offload_queue.take_stores()
        transfers.loads += self._started
        self._started = []

    def on_sent(self, step: Step, workers: KvWorkers) -> None:
        for load in step.loads:
            workers.call(WAIT_FOR_LOAD, load.load_id).add_done_callback(partial(self._on_loaded, load.load_id))

    def _on_loaded(self, load_id: int, reply: Future[KvLoaded | None]) -> None:
        self.finish(load_id, reply.result())
        self._wake()

    def on_completed(self, transfers: KvTransfers) -> None:
        self.offload_queue.finish_stores(transfers.stores)

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        self.load_policy.observe_step(prompt_tokens, seconds)

    def on_steps_failed(self) -> None:
        self.on_reset()

    def on_reset(self) -> None:
        """No load is left."""
        self._loads.clear()
        self._load_of.clear()
        self._started = []

    def wait_of(self, req: Req, context: LoadContext) -> Wait | None:
        """What a request waits for before it is admitted: a load of its prefix, which may begin now.

        Loads for requests that could not run yet begin one after the other: they must not delay those of others.
        """
        if req.loads_checked == req.num_admissions or not req.uses_tiers:
            return None
        if context.is_prefetch and (self._loads or self.storage.is_reading):
            return None
        return self._wait_for_storage(req, context.now_s) or self._wait_for_load(req, context)

    def finish(self, load_id: int, reply: KvLoaded | None) -> None:
        """A load has ended; None: the workers are lost."""
        if reply is None or load_id not in self._loads:
            return
        load = self._loads.pop(load_id)
        if reply.is_valid:
            self.load_policy.observe_load(len(load.prefix.slots), reply.seconds, self._clock())
        self._load_of = {key: pending for key, pending in self._load_of.items() if pending is not load}
        host = self.offload_queue.host
        is_kept = [host.get(key) for key in load.keys] == load.blocks  # if not, it was discarded meanwhile
        is_valid = reply.is_valid and is_kept
        host.unpin(load.blocks)
        self._pool.finish_load(load.prefix, is_valid)
        self.num_loaded += load.tokens if is_valid else 0
        load.wait.end()

    def report(self, metrics: RouterMetrics) -> None:
        for tier, values in self.metrics().items():
            metrics.set_tier(tier, values)

    def metrics(self) -> dict[str, dict[str, float]]:
        """By tier."""
        ram = {
            "stored_tokens_total": self.offload_queue.num_stored,
            "hits_total": self.num_loaded,
            "recomputed_tokens_total": self.num_recomputed,
            "late_total": self.num_late,
            "used_bytes": len(self.offload_queue.host) * self._block_bytes,
            "load_bytes_per_second": self.load_policy.bytes_per_second,
        }
        return {"ram": ram} | {tier.name: tier.metrics() for tier in self.storage.tiers}

    def _wait_for_load(self, req: Req, context: LoadContext) -> Wait | None:
        """For the load that brings the next tokens of a request, which may be another's; None: it computes them."""
        cached = self._pool.cached_len(req)
        keys = self._keys_after(req, cached)
        if keys and keys[0] in self._load_of:
            return self._load_of[keys[0]].wait
        host_keys = list(itertools.takewhile(self.offload_queue.host.__contains__, keys))
        begin = cached // BLOCK_TOKENS * BLOCK_TOKENS
        end = begin + len(host_keys) * BLOCK_TOKENS
        if end - cached >= MIN_TOKENS and not context.has_room(end):
            return None  # it does not fit either, most likely, and is asked again
        req.loads_checked = req.num_admissions
        if end - cached < MIN_TOKENS:
            return None
        if not self.load_policy.allows(end - cached, self._queued_tokens, context.now_s):
            self.num_recomputed += end - cached
            return None
        return self._start(req, host_keys, begin, cached, context.now_s).wait

    def _keys_after(self, req: Req, cached: int) -> list[bytes]:
        """Of the blocks of a request that are not in the pool, if so many tokens are."""
        return self.offload_queue.keys_of(req, len(cacheable(req)))[cached // BLOCK_TOKENS :]

    def _wait_for_storage(self, req: Req, now_s: float) -> Wait | None:
        if req.lora_id is not None:
            return None

        def missing() -> list[bytes]:
            host = self.offload_queue.host
            keys = self._keys_after(req, self._pool.cached_len(req))[: host.size]  # the first ones must not make room
            return list(itertools.dropwhile(host.__contains__, keys))

        return self.storage.wait_of(req, missing, now_s)

    @property
    def _queued_tokens(self) -> int:
        return sum(len(load.prefix.slots) for load in self._loads.values())

    def _start(self, req: Req, keys: list[bytes], begin: int, cached: int, now_s: float) -> Load:
        end = begin + len(keys) * BLOCK_TOKENS
        # pinned first: the slots may come from an eviction, which needs host memory
        blocks = self.offload_queue.host.pin(keys)
        prefix = self._pool.start_load(req, begin, end)
        wait = Wait(self.load_policy.deadline_s(end - cached, now_s), self._on_late)
        load = Load(prefix, keys, blocks, end - cached, wait)
        load_id = next(self._ids)
        self._loads[load_id] = load
        self._load_of |= dict.fromkeys(keys, load)
        self._started.append(KvLoad(load_id, np.array(blocks, dtype=np.int32), prefix.slots))
        return load

    def _on_late(self, req: Req) -> None:
        req.loads_checked = req.num_admissions
        self.num_late += 1
