"""KV tiers of a simulated server: the router's part is the real one, and copies take their bytes by a rate."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import CpuKvSize
from lightserve.messages.step import KvLoad
from lightserve.messages.worker_calls import KvFetch, KvFetched, KvFlush, KvFlushed, KvLoaded, KvLookup
from lightserve.router.kv.tiers.tiers import KvTiers
from lightserve.router.scheduler import Scheduler

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Store:
    """A tier of a server."""

    name: str
    num_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0
    is_shared: bool = False  # all servers have the same one, each with the rate


@dataclass(frozen=True, slots=True)
class Tiers:
    """``ram`` holds what leaves the pool. ``storage`` are the stores below it, in their order."""

    token_bytes: int  # of the KV of a token, in all cards
    ram: Store
    storage: tuple[Store, ...] = ()

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * BLOCK_TOKENS


class StoreBlocks:
    """The keys in a store. The least recently used one makes room."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, key: bytes) -> bool:
        """Returns whether it is new."""
        is_new = key not in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)
        return is_new

    def remove(self, key: bytes) -> None:
        self._keys.pop(key, None)


class TimedReply(Generic[T]):
    """A future of the simulated time."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._callback: Callable[[TimedReply[T]], object] = lambda _: None

    def result(self) -> T:
        return self._value

    def add_done_callback(self, callback: Callable[[TimedReply[T]], object], /) -> None:
        self._callback = callback

    def resolve(self) -> None:
        self._callback(self)


class SimulatedTiers:
    """The workers' part of the tiers of one server. A tier copies one thing after the other."""

    def __init__(self, tiers: Tiers, scheduler: Scheduler, shared: dict[str, StoreBlocks]) -> None:
        """``shared``: the stores of all servers, by name."""
        self._tiers = tiers
        self._stores = [self._blocks_of(store, shared) for store in tiers.storage]
        self._free_s: dict[str, float] = {}  # when a tier has nothing more to read
        self._events: list[tuple[float, int, Callable[[], object]]] = []  # a heap
        self._order = itertools.count()
        self._now = 0.0
        names = tuple(store.name for store in tiers.storage)
        size = CpuKvSize(int(tiers.ram.num_bytes // tiers.block_bytes), tiers.block_bytes, names)
        self._scheduler = scheduler
        self._router = KvTiers(scheduler.only_group.pool, size)
        self._router.use_clock(lambda: self._now)
        self._router.storage.connect(self, lambda: None)
        scheduler.only_group.add_source(self._router)

    def _blocks_of(self, store: Store, shared: dict[str, StoreBlocks]) -> StoreBlocks:
        blocks = StoreBlocks(int(store.num_bytes // self._tiers.block_bytes))
        return shared.setdefault(store.name, blocks) if store.is_shared else blocks

    @property
    def next_s(self) -> float:
        """When something ends, or a request stops waiting."""
        deadline_s = self._scheduler.only_group.queue.next_deadline_s()
        event_s = self._events[0][0] if self._events else math.inf
        return min(event_s, math.inf if deadline_s is None or deadline_s <= self._now else deadline_s)

    def advance(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            self._now, _, resolve = heapq.heappop(self._events)
            resolve()
        self._now = now

    def observe_step(self, prompt_tokens: int, seconds: float) -> None:
        self._router.load_policy.observe_step(prompt_tokens, seconds)

    def metrics(self) -> dict[str, dict[str, float]]:
        """By tier."""
        return self._router.metrics()

    def load(self, loads: Sequence[KvLoad]) -> None:
        """A step begins to copy blocks from host memory."""
        for load in loads:
            end_s = self._read_until(self._tiers.ram, len(load.blocks))
            self._at(end_s, partial(self._router.finish, load.load_id, KvLoaded(end_s - self._now)))

    def lookup(self, command: KvLookup) -> TimedReply[list[int] | None]:
        stores: list[int] = []
        for key in command.keys:
            store = next((number for number, blocks in enumerate(self._stores) if key in blocks), None)
            if store is None:
                break
            stores.append(store)
        return self._reply(stores, self._now + max(store.latency_s for store in self._tiers.storage))

    def fetch(self, command: KvFetch) -> TimedReply[KvFetched | None]:
        blocks = self._stores[command.store]
        are_valid = [key in blocks for key in command.keys]
        end_s = self._read_until(self._tiers.storage[command.store], sum(are_valid))
        return self._reply(KvFetched(are_valid, end_s - self._now), end_s)

    def flush(self, command: KvFlush) -> TimedReply[KvFlushed | None]:
        """As fast as the stores read, beside what they read."""
        seconds, written = 0.0, []
        for store, blocks in zip(self._tiers.storage, self._stores, strict=True):
            for key in command.removed:
                blocks.remove(key)
            written.append(sum([blocks.put(key) for key in command.keys]))
            seconds += store.latency_s + written[-1] * self._tiers.block_bytes / store.bytes_per_s
        used = [len(blocks) * self._tiers.block_bytes for blocks in self._stores]
        return self._reply(KvFlushed(written, [0] * len(used), used), self._now + seconds)

    def _read_until(self, store: Store, num_blocks: int) -> float:
        begin_s = max(self._now + store.latency_s, self._free_s.get(store.name, 0.0))
        self._free_s[store.name] = begin_s + num_blocks * self._tiers.block_bytes / store.bytes_per_s
        return self._free_s[store.name]

    def _reply(self, value: T, at_s: float) -> TimedReply[T | None]:
        reply: TimedReply[T | None] = TimedReply(value)
        self._at(at_s, reply.resolve)
        return reply

    def _at(self, at_s: float, callback: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), callback))
