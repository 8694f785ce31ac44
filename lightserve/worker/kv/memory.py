"""The memory of the KV cache, which a trainer on the same device needs between rollouts."""

from __future__ import annotations

from functools import partial

import torch

from lightserve.common.device import Device
from lightserve.common.kv.mem_manager import MemoryManager, TakeMemory
from lightserve.messages.worker_calls import KvMemory, KvMemoryChanged
from lightserve.utils.logger import init_logger
from lightserve.worker.step_runner import StepRunner

logger = init_logger(__name__)


def memory_to_release(platform: Device, device: torch.device) -> TakeMemory | None:
    """Memory that keeps its addresses when it is released; None: the device has none such, and torch's is taken."""
    mapper = platform.memory_mapper
    return partial(mapper.take, device=device) if mapper is not None and mapper.can_map(device) else None


class KvPoolMemory:
    """Frees it without the weights. Captured steps contain its addresses: if those change, they are captured again."""

    def __init__(self, memory: MemoryManager, runner: StepRunner, platform: Device, device: torch.device) -> None:
        self._memory = memory
        self._runner = runner
        self._platform = platform
        self._device = device
        self._is_released = False

    def handle(self, command: KvMemory) -> KvMemoryChanged:
        if command.is_released == self._is_released:
            return self._changed
        self._platform.set_current(self._device)
        try:
            self._release() if command.is_released else self._restore()
        except RuntimeError as error:  # of torch: somebody else has the memory
            logger.warning("the memory of the KV cache could not be changed: %s", error)
            return KvMemoryChanged(str(error).splitlines()[0])
        self._is_released = command.is_released
        return self._changed

    @property
    def _changed(self) -> KvMemoryChanged:
        return KvMemoryChanged(keeps_graphs=self._memory.keeps_addresses)

    def _release(self) -> None:
        torch.zeros(1, device=self._device).cpu()  # comes after all that was launched
        if not self._memory.keeps_addresses:
            self._runner.drop_captured()
        self._memory.release()
        self._platform.free_cached_memory()

    def _restore(self) -> None:
        self._memory.restore()
        if not self._memory.keeps_addresses:
            self._runner.capture()
