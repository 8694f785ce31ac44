"""The worker's part of the tiers below host memory: it copies blocks between host memory and stores, beside steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightserve.config import WorkerConfig
from lightserve.messages.control import KvIdentity
from lightserve.messages.worker_calls import NO_STORE, KvFetch, KvFetched, KvFlush, KvFlushed, KvLookup
from lightserve.utils.logger import init_logger
from lightserve.worker.kv.identity import rank_identity
from lightserve.worker.kv.offload.block_store.base import BlockStore
from lightserve.worker.kv.offload.block_store.disk import DiskStore
from lightserve.worker.kv.offload.block_store.frame import BlockError
from lightserve.worker.kv.offload.block_store.redis import RedisStore
from lightserve.worker.kv.offload.cpu_offload import CpuOffload

logger = init_logger(__name__)

READERS = 4  # one core hashes 1 GB/s, slower than a disk reads
LOGGED_ERRORS = 5  # then only the metric counts them


class StorageBackend:
    """Each method may be called by a thread of its own."""

    def __init__(self, host: CpuOffload, stores: Sequence[BlockStore]) -> None:
        self._host = host
        self._stores = stores
        self._readers = ThreadPoolExecutor(READERS, "kv-readers")
        self._num_errors = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(store.name for store in self._stores)

    def lookup(self, command: KvLookup) -> list[int]:
        """The first store that has each of these keys."""
        by_store = [store.find(command.keys) for store in self._stores]
        return [are_there.index(True) if any(are_there) else NO_STORE for are_there in zip(*by_store, strict=True)]

    def fetch(self, command: KvFetch) -> KvFetched:
        """Read blocks into host memory."""
        begin = time.monotonic()
        self._host.finish_stores(command.after)  # a block may have had another use before
        store = self._stores[command.store]

        def read(key: bytes, block: int) -> bool:
            try:
                store.get(key, self._host.data(block))
            except BlockError as error:
                self._log(store, error)
                return False
            return True

        are_valid = list(self._readers.map(read, command.keys, command.blocks))
        return KvFetched(are_valid, time.monotonic() - begin)

    def flush(self, command: KvFlush) -> KvFlushed:
        """Write blocks from host memory to all stores."""
        self._host.finish_stores(command.after)
        written, errors = [0] * len(self._stores), [0] * len(self._stores)
        for number, store in enumerate(self._stores):
            for key in command.removed:
                store.remove(key)
            for key, block in zip(command.keys, command.blocks, strict=True):
                try:
                    written[number] += store.put(key, self._host.data(block))
                except BlockError as error:
                    self._log(store, error)
                    errors[number] += 1
        return KvFlushed(written, errors, [store.used_bytes for store in self._stores])

    def _log(self, store: BlockStore, error: BlockError) -> None:
        self._num_errors += 1
        if self._num_errors <= LOGGED_ERRORS:
            logger.warning("KV tier %s: %s", store.name, error)


def make_storage_backend(
    config: WorkerConfig, host: CpuOffload | None, kv_identity: KvIdentity, rank: int, num_engines: int
) -> StorageBackend | None:
    """None without a tier below host memory. The weights are part of the router's keys.

    ``rank``: among those that compute the same requests. ``num_engines`` and their attention groups share the stores.
    """
    if host is None or not config.storage_tiers:
        return None
    identity = rank_identity(kv_identity, rank, host.num_pools)
    stores: list[BlockStore] = []
    if config.kv_disk_gb and config.kv_disk_dir is not None:
        num_ranks = config.ranks_per_group
        share, group = int(config.kv_disk_gb * 2**30 / num_ranks), f"ranks{num_ranks}.{rank}"
        stores.append(DiskStore(Path(config.kv_disk_dir), group, share, identity, num_engines))
    if config.kv_remote is not None:
        stores.append(RedisStore(config.kv_remote, identity))
    return StorageBackend(host, stores)
