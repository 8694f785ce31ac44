"""Host memory through which KV passes between the device and other engines."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.common.device import Device
from lightserve.common.kv.host_kv import HostKv, block_bytes
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.utils.block_hash import BLOCK_TOKENS

FRAME_BYTES = 2**25  # a frame has so many at most, or one block
STAGED_FRAMES = 16  # frames in host memory: on their way to the device or to the network


def frame_blocks(size: int) -> int:
    """Blocks of a frame, of ``size`` bytes each."""
    return max(FRAME_BYTES // size, 1)


class Staging:
    """Host memory for the blocks of some frames."""

    def __init__(self, memory: MemoryManager, platform: Device) -> None:
        size = block_bytes(memory.layout, BLOCK_TOKENS)
        count = frame_blocks(size) * STAGED_FRAMES
        self.chunks: list[Tensor] = []
        self.kv = HostKv(memory, count, BLOCK_TOKENS, lambda nbytes: self._new_chunk(platform, nbytes))
        self._free = list(range(count - 1, -1, -1))
        self._has_freed = threading.Condition()

    def _new_chunk(self, platform: Device, nbytes: int) -> Tensor:
        self.chunks.append(platform.host_memory((nbytes,), torch.uint8))
        return self.chunks[-1]

    def take(self, count: int, timeout_s: float) -> list[int] | None:
        """So many blocks; None: there are none for so long."""
        with self._has_freed:
            if not self._has_freed.wait_for(lambda: len(self._free) >= count, timeout_s):
                return None
            return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        with self._has_freed:
            self._free += reversed(blocks)
            self._has_freed.notify_all()

    def data(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self.kv[block].numpy().data for block in blocks]
