"""The worker's part of the host memory tier: it copies blocks of KV as the router's steps say."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch
from torch import Tensor

from lightserve.common.device import Device, to_device
from lightserve.common.kv.cpu_kv import CpuKv, block_bytes
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.errors import ServerError
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.control import CpuKvSize
from lightserve.messages.int_arrays import Int32s, int32s
from lightserve.messages.step import KvLoad, KvStore
from lightserve.messages.worker_calls import KvLoaded
from lightserve.utils.logger import init_logger
from lightserve.utils.memory import free_ram

logger = init_logger(__name__)

MAX_SHARE = 0.9  # of the free RAM


class CpuOffload:
    """One thread runs steps, and so stores and starts loads. Another waits for loads."""

    def __init__(self, memory: MemoryManager, num_blocks: int, platform: Device, device: torch.device) -> None:
        self._device = device
        self._copies = platform.copy_stream(device)
        self._kv = CpuKv(memory, num_blocks, BLOCK_TOKENS, lambda size: platform.host_memory((size,), torch.uint8))
        self._loads: dict[int, Future[float]] = {}
        self._last_store = 0
        self._has_changed = threading.Condition()

    def size(self, ranks: int, storage_tiers: tuple[str, ...] = ()) -> CpuKvSize:
        return CpuKvSize(len(self._kv), self._kv.block_bytes * ranks, storage_tiers)

    def data(self, block: int) -> memoryview:
        """The bytes of a block that no copy is using."""
        return self._kv[block].numpy().data

    def finish_stores(self, last: int) -> None:
        """Wait until this store and those before it are in host memory."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._last_store >= last)
        self._copies.finish_down()

    @torch.inference_mode()
    def store(self, command: KvStore) -> None:
        slots = self._by_block(command.slots)
        hosts = [self._kv[number] for number in int32s(command.blocks).tolist()]
        self._copies.down(hosts, lambda block_range, blocks: self._kv.gather(slots[block_range], blocks))
        with self._has_changed:
            self._last_store = command.store_id
            self._has_changed.notify_all()

    @torch.inference_mode()
    def start_load(self, command: KvLoad) -> None:
        hosts = [self._kv[number] for number in int32s(command.blocks).tolist()]
        slots = self._by_block(command.slots)
        load = self._copies.up(hosts, lambda block_range, blocks: self._kv.scatter(blocks, slots[block_range]))
        with self._has_changed:
            self._loads[command.load_id] = load
            self._has_changed.notify_all()

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

    def _by_block(self, slots: Int32s) -> Tensor:
        # a copy: torch warns of arrays that are views of a message
        return to_device(int32s(slots).copy(), self._device).long().view(-1, BLOCK_TOKENS)


def make_cpu_offload(
    config: WorkerConfig, memory: MemoryManager, platform: Device, parallel: Parallel, num_engines: int
) -> CpuOffload | None:
    """None without --kv_ram_gb."""
    if not config.kv_ram_gb:
        return None
    if memory.group_sizes or memory.state_rows:
        raise RuntimeError("a host tier with a second KV pool passed the table of combinations")
    device = memory.buffers[0].device
    own_bytes = int(config.kv_ram_gb * 2**30 / num_engines / config.num_ranks)
    num_blocks = own_bytes // block_bytes(memory.layout, BLOCK_TOKENS)
    num_blocks = parallel.min_of_engine(num_blocks, device)
    if not num_blocks:
        wanted = block_bytes(memory.layout, BLOCK_TOKENS) * config.num_ranks * num_engines / 2**30
        raise ServerError(
            f"kv_ram_gb={config.kv_ram_gb:g} holds no block of {BLOCK_TOKENS} tokens: {wanted:.3g} at least"
        )
    if own_bytes > free_ram() * MAX_SHARE:
        raise ServerError(
            f"kv_ram_gb={config.kv_ram_gb:g}: this rank needs {own_bytes / 2**30:.1f} GiB of host memory, and "
            f"{free_ram() / 2**30:.1f} GiB are free; lower it"
        )
    return CpuOffload(memory, num_blocks, platform, device)
