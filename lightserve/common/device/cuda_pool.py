"""GPU memory of many tensors that can be moved to the host while their addresses stay: pools of torch.

    use ─▶ a model loads ─▶ release: copy to the host, unmap the pages ─▶ restore: map other pages, copy back

Torch allocates in the pool by functions in C, since it calls them with a lock held for which threads of Python wait.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_char_p, c_int, c_uint, c_uint8, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightserve.common.compile.c_library import library_of
from lightserve.common.device import cuda_mapped
from lightserve.errors import ServerError
from lightserve.utils.logger import init_logger
from lightserve.utils.memory import free_ram

logger = init_logger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "mapped_pool.c"
ALLOCATE, ALLOCATE_SCRATCH, FREE = "pool_allocate", "scratch_allocate", "pool_free"
HOST_MARGIN = 2**30  # bytes of host memory that a release leaves free

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "pool_open": (c_char_p,),
    "pool_blocks": (c_void_p, c_void_p, c_void_p, c_int),
    "pool_unmap": (c_uint64,),
    "pool_map": (c_uint64,),
    "pool_drop": (c_uint64,),
}
COPIES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_uint64),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_uint64),
    "cuMemHostRegister_v2": (c_void_p, c_uint64, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


class Block(NamedTuple):
    """What torch has taken from the driver."""

    address: int
    size: int
    is_scratch: int  # its content is lost in a release


class PoolLibrary(ctypes.CDLL):
    """The functions in C, and those of the driver that copy."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        self.driver = ctypes.CDLL(cuda_mapped.LIBRARY)
        for library, functions in ((self, FUNCTIONS), (self.driver, COPIES)):
            for name, types in functions.items():
                getattr(library, name).argtypes = types
        if self.pool_open(cuda_mapped.LIBRARY.encode()):
            raise OSError(f"{cuda_mapped.LIBRARY} maps no memory")

    def blocks(self) -> list[Block]:
        """Those in use, by address."""
        count = self.pool_blocks(None, None, None, 0)
        columns = (c_uint64 * count)(), (c_uint64 * count)(), (c_uint8 * count)()
        count = min(count, self.pool_blocks(*columns, count))
        return sorted(map(Block, *(column[:count] for column in columns)))


class CudaMappedPool:
    """A MappedPool: see base.py. There is one in a process."""

    def __init__(self, library: PoolLibrary, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._pool: Any = None  # of torch
        self._pools: list[Any] = []  # with their allocators: they have to outlive what is allocated in them
        self._host = HostCopy(library.driver)
        self._is_released = False

    @contextmanager
    def use(self) -> Iterator[None]:
        self._pool = self._pool or self._new_pool(ALLOCATE)
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def new_graph_pool(self) -> Any:
        """The handle of memory for captured steps, which write it before they read it: its content may be lost."""
        return self._new_pool(ALLOCATE_SCRATCH).id

    def _new_pool(self, allocate: str) -> Any:
        allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(str(self._library.path), allocate, FREE)
        pool = torch.cuda.MemPool(allocator.allocator())
        self._pools.append((allocator, pool))
        return pool

    def settle(self) -> None:
        """What was freed in the pool is not taken from it again."""
        cuda_mapped.make_context_current(self._device)
        segments = self._pool.snapshot() if self._pool else []
        unused = [segment["address"] for segment in segments if not segment["allocated_size"]]
        for address in unused:
            cuda_mapped.check(self._library.pool_drop(address))

    @property
    def num_bytes(self) -> int:
        return _size(self._library.blocks())

    def release(self) -> None:
        if self._is_released:
            return
        cuda_mapped.make_context_current(self._device)
        blocks = self._library.blocks()
        copied = [block for block in blocks if not block.is_scratch]
        self._host.take(_size(copied))
        self._host.read(copied)
        for block in blocks:
            cuda_mapped.check(self._library.pool_unmap(block.address))
        self._is_released = True

    def restore(self) -> None:
        if not self._is_released:
            return
        cuda_mapped.make_context_current(self._device)
        torch.cuda.empty_cache()  # what torch has cached is not free for the driver
        blocks = self._library.blocks()
        try:
            for block in blocks:
                self._map(block.address)
        except BaseException:
            for block in blocks:  # perhaps another process has the rest: leave it what was free
                self._library.pool_unmap(block.address)
            raise
        self._host.write([block for block in blocks if not block.is_scratch])
        self._is_released = False

    def _map(self, address: int) -> None:
        result = self._library.pool_map(address)
        if result == cuda_mapped.OUT_OF_MEMORY:
            free, _ = torch.cuda.mem_get_info(self._device)
            size = self.num_bytes
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: the worker needs {size:,} bytes again, {free:,} are left for the rest of them"
            )
        cuda_mapped.check(result)


class HostCopy:
    """Host memory for what is in blocks of a device. It is kept for the next time: pinning it takes seconds."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        self._memory: mmap.mmap | None = None
        self._address = 0

    def take(self, num_bytes: int) -> None:
        if self._memory is not None and len(self._memory) == num_bytes:
            return
        self._free()
        if not num_bytes:
            return
        if num_bytes + HOST_MARGIN > (free := free_ram()):
            raise ServerError(
                f"the host has {free:,} bytes of free memory, and {num_bytes:,} are needed for the weights"
            )
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError, ValueError):  # a kernel without large pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        result = self._driver.cuMemHostRegister_v2(self._address, num_bytes, 0)
        if result:
            logger.warning("host memory for the weights is not pinned (%d), so copies are slow", result)

    def read(self, blocks: list[Block]) -> None:
        """From the device."""
        for offset, address, size in _places(blocks):
            cuda_mapped.check(self._driver.cuMemcpyDtoH_v2(self._address + offset, address, size))

    def write(self, blocks: list[Block]) -> None:
        for offset, address, size in _places(blocks):
            cuda_mapped.check(self._driver.cuMemcpyHtoD_v2(address, self._address + offset, size))

    def _free(self) -> None:
        if self._memory is not None:
            self._driver.cuMemHostUnregister(self._address)
            self._memory = None


def _size(blocks: list[Block]) -> int:
    return sum(block.size for block in blocks)


def _places(blocks: list[Block]) -> Iterator[tuple[int, int, int]]:
    """Where each block is in host memory, its address, and its size."""
    offset = 0
    for address, size, _ in blocks:
        yield offset, address, size
        offset += size


class CudaMemoryPools:
    """Of this process, which has one at most."""

    def __init__(self) -> None:
        self._opened: CudaMappedPool | None = None

    def open(self, device: torch.device) -> CudaMappedPool | None:
        if not cuda_mapped.CudaMemoryMapper().can_map(device):
            return None
        library = pool_library()
        self._opened = None if library is None else CudaMappedPool(library, device)
        return self._opened

    def graph_pool(self) -> Any:
        """The handle of memory for graphs, which a release frees too."""
        return torch.cuda.graph_pool_handle() if self._opened is None else self._opened.new_graph_pool()


@cache
def pool_library() -> PoolLibrary | None:
    """None, with the reason in the log, if this machine cannot compile it."""
    path = library_of(SOURCE)
    if path is None:
        return None
    try:
        return PoolLibrary(path)
    except (OSError, AttributeError) as error:  # no such driver, or an old one
        logger.warning("weights cannot be moved to the host: %s", error)
        return None
