"""Which slots of the KV cache are in use. The scheduler's side of KV memory, without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]


class TokenSlots:
    """Allocates the slots ``0 .. size - 1``, each to one owner at a time. New slots come in ascending runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: Slots = np.arange(size - 1, -1, -1, dtype=np.int32)  # a stack: the top is at _num_free
        self._num_free = size
        self._is_used = np.zeros(size, dtype=np.bool_)
        self._mark: Slots = np.empty(size, dtype=np.int32)  # scratch: to find slots that one call frees twice

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.size - self._num_free

    def alloc(self, count: int) -> Slots:
        if count > self._num_free:
            raise ValueError(
                f"{count} KV slots wanted, {self._num_free} of {self.size} free; the scheduler planned too many tokens"
            )
        top = self._num_free
        slots = self._free[top - count : top][::-1].copy()
        self._num_free = top - count
        self._is_used[slots] = True
        return slots

    def free(self, slots: Slots) -> None:
        order = np.arange(len(slots), dtype=np.int32)
        self._mark[slots] = order
        if not self._is_used[slots].all() or not np.array_equal(self._mark[slots], order):
            raise ValueError("a KV slot was freed twice")
        self._is_used[slots] = False
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)
