"""Host memory through which KV passes between the device and other engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightserve.common.device import Device
from lightserve.common.kv.cpu_kv import BlockFormat, CpuKv, block_formats
from lightserve.common.kv.mem_manager import MemoryManager
from lightserve.messages.block_hash import BLOCK_TOKENS

FRAME_BYTES = 2**25  # a frame has so many at most, or one block
STAGED_FRAMES = 16  # frames in host memory: on their way to the device or to the network
STAGED_GROUP_FRAMES = 4  # the same of a KV group: only the last blocks of a prompt have some
STALL_S = 0.5  # a receiver that takes no frame for so long has stalled: four at once take 0.1 s at 10 Gbit/s


def frame_blocks(size: int) -> int:
    """Blocks of a frame, of ``size`` bytes each."""
    return max(FRAME_BYTES // size, 1)


class Staging:
    """Host memory for the blocks of some frames, which are of one pool."""

    def __init__(self, memory: MemoryManager, platform: Device, pool: int = 0) -> None:
        block_format = block_formats(memory, BLOCK_TOKENS)[pool]
        count = frame_blocks(block_format.num_bytes) * (STAGED_GROUP_FRAMES if pool else STAGED_FRAMES)
        self.chunks: list[Tensor] = []
        self.kv = CpuKv(block_format, count, lambda nbytes: self._new_chunk(platform, nbytes))
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

    def hosts(self, blocks: Sequence[int], block_format: BlockFormat) -> list[Tensor]:
        """The memory of these blocks for blocks of this format, which may be smaller."""
        return [self.kv[block][: block_format.num_bytes] for block in blocks]


def views_of(hosts: Sequence[Tensor]) -> list[memoryview]:
    return [host.numpy().data for host in hosts]


@dataclass(slots=True)
class _Receiver:
    moved_s: float  # when it took a frame, or got its first one
    num_held: int = 0  # blocks on their way to it
    has_stalled: bool = False  # since it took a frame


class SendStaging(Staging):
    """Shared by the receivers of a sender. Each may hold as many blocks as it leaves free, so that one that takes
    nothing leaves room for the others."""

    def __init__(self, memory: MemoryManager, platform: Device, pool: int = 0) -> None:
        super().__init__(memory, platform, pool)
        self._receivers: dict[str, _Receiver] = {}  # by address

    def take_for(self, address: str, count: int) -> list[int] | None:
        """Blocks of a frame to this receiver. It waits for one that takes frames; None: it does not."""
        with self._has_freed:
            receiver = self._receiver(address)
            while receiver.num_held + count > len(self._free):
                left_s = receiver.moved_s + STALL_S - time.monotonic()
                if receiver.has_stalled or left_s <= 0:
                    receiver.has_stalled = receiver.num_held > 0  # if not, others have all blocks
                    return None
                self._has_freed.wait(left_s)
            receiver.num_held += count
            return [self._free.pop() for _ in range(count)]

    def give_back_from(self, address: str, blocks: Sequence[int], was_sent: bool) -> None:
        """A frame to this receiver was sent, or lost."""
        with self._has_freed:
            receiver = self._receivers[address]
            receiver.num_held -= len(blocks)
            if was_sent:
                receiver.moved_s, receiver.has_stalled = time.monotonic(), False
            self.give_back(blocks)

    def _receiver(self, address: str) -> _Receiver:
        self._receivers = {
            name: receiver for name, receiver in self._receivers.items() if receiver.num_held or receiver.has_stalled
        }
        return self._receivers.setdefault(address, _Receiver(time.monotonic()))
