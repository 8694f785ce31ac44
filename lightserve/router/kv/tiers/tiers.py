"""Loads the prefixes of waiting requests from host memory, if that is faster than computing them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from lightserve.ipc.worker_calls import WAIT_FOR_LOAD
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import CpuKvSize
from lightserve.messages.int_arrays import Int32s, int32s
from lightserve.messages.step import KvLoad, Step
from lightserve.messages.worker_calls import KvLoaded
from lightserve.router.kv.pool import CachedPrefix, KvPool, PrefixLoad, cacheable
from lightserve.router.kv.pool_listener import PoolListener
from lightserve.router.kv.slots import Slots
from lightserve.router.kv.source import Activity, KvSource, KvTransfers, KvWorkers, LoadContext
from lightserve.router.kv.tiers.cpu_block_tables import CpuBlockTables
from lightserve.router.kv.tiers.group_blocks import LoadPlan, PrefixBlocks
from lightserve.router.kv.tiers.load_or_recompute import LoadOrRecompute, Rate
from lightserve.router.kv.tiers.offload_queue import OffloadQueue
from lightserve.router.kv.tiers.storage import Reply, StorageTiers
from lightserve.router.observability.stats import Figures
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
    num_open: int = 0  # its commands, one for each pool
    is_valid: bool = True
    seconds: float = 0.0


class KvTiers(KvSource, PoolListener):
    """A request waits for its load before it is admitted, up to the time that computing would take.

    The slots of a load belong to no request. When it ends, they enter the prefix cache, where requests find them.
    """

    def __init__(self, pool: KvPool, size: CpuKvSize, identity: str = "") -> None:
        """``identity``: of everything that the KV depends on, besides tokens, salt and adapter."""
        computing, host = Rate(), CpuBlockTables(size)
        self.load_policy = LoadOrRecompute(size.block_bytes // BLOCK_TOKENS, computing)
        self.storage = StorageTiers(size.storage_tiers, host, size.block_bytes, computing)
        max_ahead = max(AHEAD_BYTES // size.block_bytes, 1)
        self.offload_queue = OffloadQueue(pool.size, self.storage, identity, max_ahead, pool.groups)
        self.num_loaded = 0  # tokens
        self.num_recomputed = 0  # tokens that were found, and computed because that is faster
        self.num_late = 0  # requests that did not wait until the end of their loads
        self._pool = pool
        self._ids = itertools.count()
        self._loads: dict[int, Load] = {}
        self._load_of: dict[bytes, Load] = {}  # by the key of a block
        self._started: list[KvLoad] = []  # that the next step begins
        self._wake: Callable[[], None] = lambda: None
        self._clock: Callable[[], float] = time.monotonic
        for group in pool.groups:
            group.align(BLOCK_TOKENS)
        pool.add_listener(self.offload_queue)
        pool.add_listener(self)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Of the simulator, whose time is not that of the machine."""
        self._clock = self.storage.clock = clock

    def connect(self, workers: KvWorkers, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.storage.connect(workers.storage_tiers, wake)

    @property
    def is_writing(self) -> bool:
        return bool(self._loads)

    @property
    def has_transfers(self) -> bool:
        is_moving = self._loads or self._started or self.storage.is_reading or self.storage.is_flushing
        return bool(is_moving) or self.offload_queue.has_work

    @property
    def stores_evicted(self) -> bool:
        return True

    def begin_step(self) -> None:
        self.offload_queue.begin_step()

    def take(self, transfers: KvTransfers, activity: Activity) -> None:
        """The step stores, and then loads."""
        if activity is Activity.COMPUTING:
            self.offload_queue.write_back()
        elif activity is Activity.IDLE:
            self.offload_queue.store_idle()
        self.offload_queue.store_groups()
        transfers.stores += self.offload_queue.take_stores()
        transfers.loads += self._started
        self._started = []

    def on_sent(self, step: Step, workers: KvWorkers) -> None:
        for load in step.loads:
            workers.call(WAIT_FOR_LOAD, load.load_id).add_done_callback(partial(self._on_loaded, load.load_id))

    def _on_loaded(self, load_id: int, reply: Reply[KvLoaded | None]) -> None:
        self.finish(load_id, reply.result())
        self._wake()

    def on_completed(self, transfers: KvTransfers) -> None:
        self.offload_queue.finish_stores(transfers.stores)

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        self.load_policy.observe_step(prompt_tokens, seconds)

    def on_steps_failed(self) -> None:
        """The loads go on. Their slots are free when they end, and nothing finds what they bring."""
        for load in self._loads.values():
            load.is_valid = False
            load.keys, load.blocks = [], []  # host memory is empty, and pins nothing
        self._load_of.clear()

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
        load.num_open -= 1
        load.is_valid &= reply.is_valid
        load.seconds += reply.seconds
        if not load.num_open:
            self._finish(load)

    def _finish(self, load: Load) -> None:
        """All its blocks have come, or will not."""
        if load.is_valid and len(load.prefix.slots):
            self.load_policy.observe_load(len(load.prefix.slots), load.seconds, self._clock())
        self._load_of = {key: pending for key, pending in self._load_of.items() if pending is not load}
        host = self.offload_queue.host
        is_kept = [host.get(key) for key in load.keys] == load.blocks  # if not, it was discarded meanwhile
        is_valid = load.is_valid and is_kept
        host.unpin(load.blocks)
        self._pool.finish_load(load.prefix, is_valid)
        self.num_loaded += load.tokens if is_valid else 0
        load.wait.end()

    def figures(self) -> Figures:
        tiers = self.metrics()
        return {(f"kv_tier_{name}", tier): value for tier in tiers for name, value in tiers[tier].items()}

    def metrics(self) -> dict[str, dict[str, float]]:
        """By tier."""
        ram = {
            "stored_tokens_total": self.offload_queue.num_stored,
            "hits_total": self.num_loaded,
            "recomputed_tokens_total": self.num_recomputed,
            "late_total": self.num_late,
            "used_bytes": self.offload_queue.host.used_bytes,
            "load_bytes_per_second": self.load_policy.bytes_per_second,
        }
        return {"ram": ram} | {tier.name: tier.metrics() for tier in self.storage.tiers}

    def _wait_for_load(self, req: Req, context: LoadContext) -> Wait | None:
        """For the load that brings the next tokens of a request, which may be another's; None: it computes them."""
        cached = self._pool.cached_prefix(req)
        blocks = self._blocks_of(req, cached)
        plan = blocks.longest_load(self.offload_queue.host.__contains__)
        keys = [] if plan is None else plan.keys(req.kv_keys)
        if loading := next((self._load_of[key] for key in keys if key in self._load_of), None):
            return loading.wait
        end = 0 if plan is None else plan.end * BLOCK_TOKENS
        is_worth_it = end - cached.usable_len >= MIN_TOKENS
        if plan is not None and is_worth_it and not self._has_room(plan, end, context):
            return None  # it does not fit either, most likely, and is asked again
        req.loads_checked = req.num_admissions
        req.branch_len = blocks.reachable(self.offload_queue.host.__contains__) * BLOCK_TOKENS
        if plan is None or not is_worth_it:
            return None
        tokens = end - cached.usable_len
        if not self.load_policy.allows(tokens, self._queued_tokens, context.now_s):
            self.num_recomputed += tokens
            return None
        return self._start(req, plan, keys, tokens, context.now_s).wait

    def _has_room(self, plan: LoadPlan, tokens: int, context: LoadContext) -> bool:
        return context.has_room(tokens) and self._pool.groups.can_load(plan.groups, context.step_tokens)

    def _blocks_of(self, req: Req, cached: CachedPrefix) -> PrefixBlocks:
        keys = self.offload_queue.keys_of(req, len(cacheable(req)))
        return PrefixBlocks(self._pool.groups, keys, cached)

    def _wait_for_storage(self, req: Req, now_s: float) -> Wait | None:
        host = self.offload_queue.host

        def missing() -> list[bytes]:
            blocks = self._blocks_of(req, self._pool.cached_prefix(req))
            keys = blocks.unpooled()
            if not self._pool.groups:
                return list(itertools.dropwhile(host.__contains__, keys[: host.size]))  # the first must not make room
            return [key for key in keys if key not in host]

        def choose(stored: Collection[bytes]) -> list[bytes]:
            blocks = self._blocks_of(req, self._pool.cached_prefix(req))
            plan = blocks.longest_load(lambda key: key in stored or key in host)
            keys = [] if plan is None else plan.keys(req.kv_keys)
            return [key for key in keys if key in stored and key not in host]

        return self.storage.wait_of(req, missing, choose, now_s)

    @property
    def _queued_tokens(self) -> int:
        return sum(len(load.prefix.slots) for load in self._loads.values())

    def _start(self, req: Req, plan: LoadPlan, keys: list[bytes], tokens: int, now_s: float) -> Load:
        """``tokens``: that it saves."""
        # pinned first: the slots may come from an eviction, which needs host memory
        blocks = self.offload_queue.host.pin(keys)
        prefix = self._pool.start_load(req, plan.begin * BLOCK_TOKENS, plan.end * BLOCK_TOKENS, plan.groups)
        wait = Wait(self.load_policy.deadline_s(tokens, now_s), self._on_late)
        load = Load(prefix, keys, blocks, tokens, wait)
        self._load_of |= dict.fromkeys(keys, load)
        left = iter(blocks)
        parts = [(plan.end - plan.begin, prefix.slots), *zip(map(len, plan.groups), prefix.group_slots, strict=True)]
        for count, slots in parts:
            if count:
                self._start_part(load, int32s(list(itertools.islice(left, count))), slots)
        return load

    def _start_part(self, load: Load, blocks: Int32s, slots: Slots) -> None:
        """Of one pool."""
        load_id = next(self._ids)
        load.num_open += 1
        self._loads[load_id] = load
        self._started.append(KvLoad(load_id, blocks, slots))

    def _on_late(self, req: Req) -> None:
        req.loads_checked = req.num_admissions
        self.num_late += 1
