"""The memory of a worker that a trainer on the same device needs between rollouts: the KV cache and the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from lightserve.common.device import Device, MappedPool
from lightserve.common.kv.mem_manager import MemoryManager, TakeMemory
from lightserve.errors import ServerError
from lightserve.messages.worker_calls import MemoryChanged, ReleasedMemory
from lightserve.utils.logger import init_logger
from lightserve.worker.step_runner import StepRunner

logger = init_logger(__name__)

CANNOT_MOVE = "this device cannot move the weights to the host"


def memory_to_release(platform: Device, device: torch.device) -> TakeMemory | None:
    """Memory that keeps its addresses when it is released; None: the device has none such, and torch's is taken."""
    mapper = platform.memory_mapper
    return partial(mapper.take, device=device) if mapper is not None and mapper.can_map(device) else None


def weight_pool(platform: Device, device: torch.device) -> MappedPool | None:
    """None: a sleep that frees the weights stops the worker."""
    return None if platform.memory_pools is None else platform.memory_pools.open(device)


@contextmanager
def weights_in(pool: MappedPool | None) -> Iterator[None]:
    """A model loads within it."""
    if pool is None:
        yield
        return
    with pool.use():
        yield
    pool.settle()


class WorkerMemory:
    """Frees it and takes it again. Captured steps contain its addresses: if those change, they are captured again."""

    def __init__(
        self, kv: MemoryManager, weights: MappedPool | None, runner: StepRunner, platform: Device, device: torch.device
    ) -> None:
        self.released = ReleasedMemory()
        self._kv = kv
        self._weights = weights
        self._runner = runner
        self._platform = platform
        self._device = device

    def handle(self, command: ReleasedMemory) -> MemoryChanged:
        """Weights first: if the host has no room for them, nothing was freed."""
        self._platform.set_current(self._device)
        try:
            if command.weights != self.released.weights:
                self._move_weights(command.weights)
            if command.kv != self.released.kv:
                self._release_kv() if command.kv else self._restore_kv()
        except (RuntimeError, OSError, ServerError) as error:  # somebody else has the memory
            logger.warning("the memory of this worker could not be changed: %s", error)
            return MemoryChanged(str(error).splitlines()[0])
        self.released = command
        return MemoryChanged(keeps_graphs=self._kv.keeps_addresses)

    def _move_weights(self, is_released: bool) -> None:
        if self._weights is None:
            raise ServerError(CANNOT_MOVE)
        if is_released:
            self._wait_for_device()
            self._weights.release()
        else:
            self._weights.restore()
        self.released = ReleasedMemory(self.released.kv, is_released)

    def _release_kv(self) -> None:
        self._wait_for_device()
        if not self._kv.keeps_addresses:
            self._runner.drop_captured()
        self._kv.release()
        self._platform.free_cached_memory()

    def _restore_kv(self) -> None:
        self._kv.restore()
        if not self._kv.keeps_addresses:
            self._runner.capture()

    def _wait_for_device(self) -> None:
        """A copy to the host comes after all that was launched."""
        torch.zeros(1, device=self._device).cpu()
