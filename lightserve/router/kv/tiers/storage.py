"""The tiers below host memory: prefixes are written there from host memory, and read back into it.

A request first asks whether its next blocks are there (lookup). They are read into host memory (fetch) if that is
faster than computing, and from there they are loaded like others. It waits for each for a limited time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.worker_calls import NO_STORE, KvFetch, KvFetched, KvFlush, KvFlushed, KvLookup
from lightserve.router.kv.tiers.cpu_block_tables import CpuBlockTables
from lightserve.router.kv.tiers.group_blocks import group_of
from lightserve.router.kv.tiers.load_or_recompute import LoadOrRecompute, Rate
from lightserve.router.req import Req
from lightserve.router.req_queue import Wait

MAX_FLUSH = 16  # blocks of one command
MAX_WAITING = 65_536  # blocks that wait to be written; more are not
LOOKUP_S = 1.0  # a request does not wait longer for a lookup
MAX_SAVED = 1 << 20  # keys that are remembered as written


T_co = TypeVar("T_co", covariant=True)
Choose = Callable[[Collection[bytes]], list[bytes]]


class Reply(Protocol[T_co]):
    """A future, as far as it is used here."""

    def result(self) -> T_co: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None: ...


class StorageClient(Protocol):
    """A reply is None if the workers are lost. It never comes before its callback is added."""

    def lookup(self, command: KvLookup) -> Reply[list[int] | None]: ...

    def fetch(self, command: KvFetch) -> Reply[KvFetched | None]: ...

    def flush(self, command: KvFlush) -> Reply[KvFlushed | None]: ...


@dataclass(slots=True, eq=False)
class Tier:
    """One of the tiers, and what is counted of it."""

    name: str
    load_policy: LoadOrRecompute
    num_stored: int = 0  # tokens
    num_fetched: int = 0
    num_recomputed: int = 0
    num_late: int = 0
    num_errors: int = 0
    used_bytes: int = 0
    queued: int = 0  # tokens that are being fetched

    def metrics(self) -> dict[str, float]:
        return {
            "stored_tokens_total": self.num_stored,
            "hits_total": self.num_fetched,
            "recomputed_tokens_total": self.num_recomputed,
            "late_total": self.num_late,
            "errors_total": self.num_errors,
            "used_bytes": self.used_bytes,
            "load_bytes_per_second": self.load_policy.bytes_per_second,
        }


@dataclass(slots=True, eq=False)
class StorageTiers:
    """Without ``names`` there are none: nothing is looked up, and nothing written."""

    names: Sequence[str]
    host: CpuBlockTables
    block_bytes: int
    computing: Rate
    wake: Callable[[], None] = lambda: None  # something has changed for waiting requests
    client: StorageClient | None = None  # None: the workers are lost
    clock: Callable[[], float] = time.monotonic
    tiers: list[Tier] = field(init=False)
    last_store: int = 0  # that is known to be made by a rank
    _fetching: dict[bytes, Wait] = field(default_factory=dict)  # by key
    _num_lookups: int = 0  # whose replies are not back
    _unsaved: dict[bytes, bool] = field(default_factory=dict)  # keys to write, in order; whether the pool has them too
    _saved: set[bytes] = field(default_factory=set)
    _removed: set[bytes] = field(default_factory=set)  # keys to remove
    _removing: set[bytes] = field(default_factory=set)  # keys that the flush in flight removes
    _discarded: set[bytes] = field(default_factory=set)  # keys that are being fetched, and may be wrong
    _is_flushing: bool = False
    _epoch: int = 0

    def __post_init__(self) -> None:
        per_token = self.block_bytes // BLOCK_TOKENS
        self.tiers = [Tier(name, LoadOrRecompute(per_token, self.computing)) for name in self.names]

    def clear(self) -> None:
        """The workers are lost, and host memory with them. What was written is still there, also what was to go."""
        self._epoch += 1
        self.client = None
        self.last_store = 0
        self._is_flushing = False
        self._num_lookups = 0
        self._fetching.clear()
        self._unsaved.clear()
        self._discarded.clear()
        self._removed |= self._removing  # nobody knows whether the workers did it
        self._removing = set()
        for tier in self.tiers:
            tier.queued = 0

    def connect(self, client: StorageClient | None, wake: Callable[[], None]) -> None:
        self.client, self.wake = client if self.tiers else None, wake
        self._flush_next()

    @property
    def is_reading(self) -> bool:
        return bool(self._fetching or self._num_lookups)

    def wait_of(self, req: Req, missing: Callable[[], list[bytes]], choose: Choose, now_s: float) -> Wait | None:
        """What a request waits for: a lookup or a fetch of its ``missing`` blocks, which may begin now.

        ``choose`` says which of the blocks that are stored are useful.
        """
        if self.client is None or not req.max_missing:
            return None
        keys = missing()
        if not keys:
            return None
        if keys[0] in self._fetching:
            return self._fetching[keys[0]]
        if len(keys) >= req.max_missing:  # what was fetched has made room for others already
            return None
        req.max_missing = len(keys)
        return self._look_up(self.client, keys, choose, now_s)

    def _look_up(self, client: StorageClient, keys: list[bytes], choose: Choose, now_s: float) -> Wait:
        wait = Wait(now_s + LOOKUP_S, self._on_late)
        self._num_lookups += 1
        reply = client.lookup(KvLookup(keys))
        reply.add_done_callback(partial(self._on_lookup, self._epoch, wait, keys, choose))
        return wait

    def _on_lookup(
        self, epoch: int, wait: Wait, keys: list[bytes], choose: Choose, reply: Reply[list[int] | None]
    ) -> None:
        stores = reply.result()
        if epoch != self._epoch or stores is None or self.client is None:
            return
        self._num_lookups -= 1
        store_of = {
            key: store for key, store in zip(keys, stores, strict=False) if store != NO_STORE and self._is_trusted(key)
        }
        useful = choose(store_of.keys())
        wanted = list(itertools.takewhile(self._is_missing, useful))
        same_store = [key for key in wanted if store_of[key] == store_of[wanted[0]]]
        fetch = self._start_fetch(store_of[wanted[0]], same_store) if wanted and wait.blocked else None
        if fetch is not None:
            wait.continue_with(fetch)
            return
        if wanted or not useful:  # if not, another request fetches them
            _stop_looking(wait)
        wait.end()
        self.wake()

    def _on_late(self, req: Req) -> None:
        req.max_missing = 0
        self.tiers[0].num_late += 1

    def _is_trusted(self, key: bytes) -> bool:
        """If not, what is there may be wrong."""
        return key not in self._removed and key not in self._removing

    def _is_missing(self, key: bytes) -> bool:
        return key not in self.host and key not in self._fetching

    def _start_fetch(self, store: int, keys: list[bytes]) -> Wait | None:
        tier, now_s = self.tiers[store], self.clock()
        tokens = _num_tokens(keys)
        if not tier.load_policy.allows(tokens, tier.queued, now_s):
            tier.num_recomputed += tokens
            return None
        if self.client is None or not (blocks := self.host.reserve(keys)):
            return None
        keys = list(blocks)
        wait = Wait(tier.load_policy.deadline_s(tokens, now_s), self._on_late)
        self._fetching |= dict.fromkeys(keys, wait)
        tier.queued += _num_tokens(keys)
        command = KvFetch(self.last_store, store, keys, list(blocks.values()))
        reply = self.client.fetch(command)
        reply.add_done_callback(partial(self._on_fetched, self._epoch, wait, command))
        return wait

    def _on_fetched(self, epoch: int, wait: Wait, command: KvFetch, reply: Reply[KvFetched | None]) -> None:
        fetched = reply.result()
        if epoch != self._epoch or fetched is None:
            return
        are_valid = fetched.are_valid or [False] * len(command.keys)  # all ranks failed
        tier, tokens = self.tiers[command.store], _num_tokens(command.keys)
        valid = list(itertools.compress(command.keys, are_valid))
        tier.queued -= tokens
        tier.num_errors += len(command.keys) - len(valid)
        tier.num_fetched += _num_tokens(valid)
        tier.load_policy.observe_load(tokens, fetched.seconds, self.clock())
        for key, block, is_valid in zip(command.keys, command.blocks, are_valid, strict=True):
            del self._fetching[key]
            is_wanted = is_valid and key not in self._discarded
            self._discarded.discard(key)
            self.host.fill(block, key if is_wanted else None)
            if is_wanted:
                self._remember(key)
        if not all(are_valid):
            _stop_looking(wait)
        wait.end()
        self.wake()

    @property
    def is_flushing(self) -> bool:
        return self._is_flushing or bool(self._unsaved)

    def is_saved(self, key: bytes) -> bool:
        return key in self._saved or key in self._unsaved

    def save(self, key: bytes, is_in_pool: bool = False) -> None:
        """Write a block that is in host memory now. If the KV pool has it too, host memory need not keep it."""
        if self.tiers and len(self._unsaved) < MAX_WAITING:
            self._unsaved.setdefault(key, is_in_pool)
            self._flush_next()

    def discard(self, keys: list[bytes]) -> None:
        """These blocks may be wrong: remove them if they were written."""
        if not self.tiers:
            return
        self._saved.difference_update(keys)
        for key in keys:
            self._unsaved.pop(key, None)
            if key in self._fetching:
                self._discarded.add(key)
        self._removed.update(keys)
        self._flush_next()

    def _flush_next(self) -> None:
        if self._is_flushing or self.client is None:
            return
        while self._unsaved or self._removed:
            first = list(self._unsaved)[:MAX_FLUSH]
            are_in_pool = {key: self._unsaved.pop(key) for key in first}
            keys = [key for key in first if key in self.host]  # others have made room already
            if not keys and not self._removed:
                continue
            self._is_flushing = True
            self._removing, self._removed = self._removed, set()
            command = KvFlush(self.last_store, keys, self.host.pin(keys), list(self._removing))
            reply = self.client.flush(command)
            reply.add_done_callback(partial(self._on_flushed, self._epoch, command, are_in_pool))
            return

    def _on_flushed(
        self, epoch: int, command: KvFlush, are_in_pool: dict[bytes, bool], reply: Reply[KvFlushed | None]
    ) -> None:
        flushed = reply.result()
        if epoch != self._epoch or flushed is None:
            return
        self._is_flushing = False
        self._removing = set()
        self.host.unpin(command.blocks)
        for key in command.keys:
            if key in self._removed:  # discarded meanwhile
                continue
            self._remember(key)
            if are_in_pool[key]:
                self.host.remove(key)
        if not flushed.written:  # a rank failed
            self.tiers[0].num_errors += len(command.keys)
        for tier, written, errors, used in zip(
            self.tiers, flushed.written, flushed.errors, flushed.used_bytes, strict=False
        ):
            tier.num_stored += written * BLOCK_TOKENS
            tier.num_errors += errors
            tier.used_bytes = used
        self._flush_next()
        self.wake()

    def _remember(self, key: bytes) -> None:
        if len(self._saved) >= MAX_SAVED:
            self._saved.clear()
        self._saved.add(key)


def _num_tokens(keys: Sequence[bytes]) -> int:
    """Blocks of KV groups are loaded beside those of all tokens."""
    return sum(BLOCK_TOKENS for key in keys if group_of(key) is None)


def _stop_looking(wait: Wait) -> None:
    """Nothing more is to be found for the requests that wait for this."""
    for entry in wait.blocked:
        entry.req.max_missing = 0
