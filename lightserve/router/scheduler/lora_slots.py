"""Which LoRA adapters are on the device. An adapter has a slot there while requests with it run, and longer if it can.

Like KV slots, these are the router's: every rank has the same adapters in the same slots, and a step brings the
adapters that its rows need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lightserve.messages.step import LoraPlace
from lightserve.router.req import Req


class LoraSlots:
    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.loaded: set[int] = set()  # adapters in the host memory of the workers
        self.on_leave: Callable[[int], None] = lambda lora_id: None  # a request with this adapter has ended
        self._free = list(range(count))[::-1]
        self._slot_of: dict[int, int] = {}  # by adapter, the least recently used first
        self._running: Counter[int] = Counter()  # requests by adapter
        self._copies: list[LoraPlace] = []  # for the next step
        self.num_changes = 0  # how often an adapter has got a slot, or has lost its last running request

    def has_slot(self, lora_id: int) -> bool:
        return lora_id in self._slot_of

    def has_room(self, lora_id: int) -> bool:
        """Whether requests with this adapter can run now: it is on the device, or can be copied there."""
        if lora_id in self._slot_of:
            return True
        return lora_id in self.loaded and (bool(self._free) or self._unused() is not None)

    @property
    def num_available(self) -> int:
        """Slots that other adapters can have."""
        return self.count - len(self._running)

    def acquire(self, req: Req) -> None:
        """Give a request that starts to run the slot of its adapter. ``has_room`` was true."""
        lora_id = req.lora_id
        if lora_id is None:
            return
        slot = self._slot_of.pop(lora_id, None)
        if slot is None:
            slot = self._free_slot()
            self.num_changes += 1
            self._copies.append(LoraPlace(slot, lora_id))
        self._slot_of[lora_id] = slot  # at the end: used last
        self._running[lora_id] += 1
        req.lora_slot = slot

    def release(self, req: Req) -> None:
        """The request does not run any more."""
        if req.lora_id is None:
            return
        req.lora_slot = -1
        self._running[req.lora_id] -= 1
        if not self._running[req.lora_id]:
            del self._running[req.lora_id]
            self.num_changes += 1

    def take_copies(self) -> list[LoraPlace]:
        """What the next step copies to the device."""
        copies, self._copies = self._copies, []
        return copies

    def is_copied(self, lora_id: int) -> bool:
        """Whether the next step copies this adapter."""
        return any(copy.lora_id == lora_id for copy in self._copies)

    def clear(self) -> None:
        """The device holds no adapters, and no request runs."""
        self.num_changes += 1
        self._free = list(range(self.count))[::-1]
        self._slot_of.clear()
        self._running.clear()
        self._copies.clear()

    def _free_slot(self) -> int:
        if self._free:
            return self._free.pop()
        unused = self._unused()
        assert unused is not None
        return self._slot_of.pop(unused)

    def _unused(self) -> int | None:
        """The least recently used adapter without running requests."""
        return next((lora_id for lora_id in self._slot_of if lora_id not in self._running), None)
