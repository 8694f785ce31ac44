"""The worker's part of the host memory tier: it copies blocks of KV as the router's steps say."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from lightserve.common.device import Device, to_device
from lightserve.common.kv.cpu_kv import BlockFormat, CpuKv, block_formats
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.errors import ServerError
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import CpuGroupSize, CpuKvSize
from lightserve.messages.int_arrays import int32s
from lightserve.messages.step import KvLoad, KvStore
from lightserve.messages.worker_calls import KvLoaded
from lightserve.utils.logger import init_logger
from lightserve.utils.memory import free_ram

logger = init_logger(__name__)

MAX_SHARE = 0.9  # of the free RAM


class CpuOffload:
    """One thread runs steps, and so stores and starts loads. Another waits for loads."""

    def __init__(
        self, memory: MemoryManager, num_blocks: Sequence[int], platform: Device, device: torch.device
    ) -> None:
        """``num_blocks``: of the pool of all tokens, and of each KV group."""
        self._device = device
        self._copies = platform.copy_stream(device)
        formats = block_formats(memory, BLOCK_TOKENS)
        self._pools = [
            CpuKv(block_format, count, lambda size: platform.host_memory((size,), torch.uint8))
            for block_format, count in zip(formats, num_blocks, strict=True)
        ]
        self._loads: dict[int, Future[float]] = {}
        self._last_store = 0
        self._has_changed = threading.Condition()

    def size(self, ranks: int, storage_tiers: tuple[str, ...] = ()) -> CpuKvSize:
        tokens, *groups = [CpuGroupSize(len(pool), pool.format.num_bytes * ranks) for pool in self._pools]
        return CpuKvSize(tokens.num_blocks, tokens.block_bytes, storage_tiers, tuple(groups))

    @property
    def num_pools(self) -> int:
        return len(self._pools)

    def data(self, block: int) -> memoryview:
        """The bytes of a block that no copy is using."""
        pool, number = self._place(block)
        return pool[number].numpy().data

    def _place(self, block: int) -> tuple[CpuKv, int]:
        """The pool of a block, and its number there."""
        for pool in self._pools:
            if block < len(pool):
                return pool, block
            block -= len(pool)
        raise ValueError(f"host memory has no block {block} more than its last one")

    def finish_stores(self, last: int) -> None:
        """Wait until this store and those before it are in host memory."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._last_store >= last)
        self._copies.finish_down()

    @torch.inference_mode()
    def store(self, command: KvStore) -> None:
        pool, hosts, slots = self._opened(command)
        self._copies.down(hosts, lambda block_range, blocks: pool.gather(slots[block_range], blocks))
        with self._has_changed:
            self._last_store = command.store_id
            self._has_changed.notify_all()

    @torch.inference_mode()
    def start_load(self, command: KvLoad) -> None:
        pool, hosts, slots = self._opened(command)
        load = self._copies.up(hosts, lambda block_range, blocks: pool.scatter(blocks, slots[block_range]))
        with self._has_changed:
            self._loads[command.load_id] = load
            self._has_changed.notify_all()

    def _opened(self, command: KvStore | KvLoad) -> tuple[BlockFormat, list[Tensor], Tensor]:
        """The format of the blocks, which are of one pool, their memory, and their slots by block."""
        places = [self._place(block) for block in int32s(command.blocks).tolist()]
        block_format = places[0][0].format
        # a copy: torch warns of arrays that are views of a message
        slots = to_device(int32s(command.slots).copy(), self._device).long().view(-1, block_format.num_slots)
        return block_format, [pool[number] for pool, number in places], slots

    def wait(self, load_id: int) -> KvLoaded:
        """The router sends the step that starts the load first, but another thread receives it."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: load_id in self._loads)
            load = self._loads.pop(load_id)
        try:
            return KvLoaded(load.result())
        except RuntimeError as error:
            logger.warning("KV cannot be loaded from host memory: %s", error)
            return KvLoaded(0.0, is_valid=False)


def make_cpu_offload(
    config: WorkerConfig, memory: MemoryManager, platform: Device, parallel: Parallel, num_engines: int
) -> CpuOffload | None:
    """None without --kv_ram_gb."""
    if not config.kv_ram_gb:
        return None
    device = memory.buffers[0].device
    own_bytes = int(config.kv_ram_gb * 2**30 / num_engines / config.num_ranks)
    num_blocks = [parallel.min_of_engine(count, device) for count in _blocks_in(own_bytes, memory)]
    if not min(num_blocks):
        sizes = [block_format.num_bytes for block_format in block_formats(memory, BLOCK_TOKENS)]
        wanted = sum(sizes) * config.num_ranks * num_engines / 2**30
        raise ServerError(
            f"kv_ram_gb={config.kv_ram_gb:g} holds no block of {BLOCK_TOKENS} tokens: {wanted:.3g} at least"
        )
    if own_bytes > free_ram() * MAX_SHARE:
        raise ServerError(
            f"kv_ram_gb={config.kv_ram_gb:g}: this rank needs {own_bytes / 2**30:.1f} GiB of host memory, and "
            f"{free_ram() / 2**30:.1f} GiB are free; lower it"
        )
    return CpuOffload(memory, num_blocks, platform, device)


def _blocks_in(num_bytes: int, memory: MemoryManager) -> list[int]:
    """How many blocks of each pool fit. The pools have the same shares as on the device."""
    sizes = [block_format.num_bytes for block_format in block_formats(memory, BLOCK_TOKENS)]
    states = [memory.state_rows / memory.size * BLOCK_TOKENS] if memory.state_rows else []  # a block has one
    shares = [1.0, *(size / memory.size for size in memory.group_sizes), *states]
    per_block = sum(share * size for share, size in zip(shares, sizes, strict=True))
    return [int(num_bytes / per_block * share) for share in shares]
