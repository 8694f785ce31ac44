"""Copies between a GPU and pinned host memory on a stream of their own, beside the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

RING_BYTES = 2**30  # of the GPU's memory, and
RING_SHARE = 1 / 128  # of all of it: blocks that wait for their copy down. Steps wait if there are more


class CudaSideCopies:
    """A copy down first gathers on the stream of the steps, which takes microseconds, into one place of a ring.

    A thread queues copies up, so that launching steps does not wait for that. The bus carries both directions at once,
    so each has its stream. A copy up waits until the copies down of its blocks have ended. The caller sees to it that
    no copy down writes to a block while a copy up reads it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "kv-copies")
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []  # with an event: its data has left
        self._num_down = 0
        self._arrived: dict[int, torch.cuda.Event] = {}  # in host memory, by its address

    def down(self, host: Tensor, gather: Callable[[Tensor], None]) -> None:
        place, has_left = self._place(host)
        steps = torch.cuda.current_stream(self._device)
        steps.wait_event(has_left)
        gather(place)
        self._down.wait_stream(steps)
        with torch.cuda.stream(self._down):
            host.copy_(place, non_blocking=True)
        has_left.record(self._down)
        arrived = self._arrived.setdefault(host.data_ptr(), torch.cuda.Event())  # type: ignore[no-untyped-call]
        arrived.record(self._down)

    def finish_down(self) -> None:
        self._down.synchronize()

    def up(self, hosts: Sequence[Tensor], scatter: Callable[[int, Tensor], None]) -> Future[float]:
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(self._device))
        arrived = [self._arrived[host.data_ptr()] for host in hosts if host.data_ptr() in self._arrived]
        return self._thread.submit(self._copy, [launched, *arrived], hosts, scatter)

    def _place(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        total = torch.cuda.get_device_properties(self._device).total_memory
        most = max(int(min(RING_BYTES, total * RING_SHARE)) // host.nbytes, 2)
        if len(self._ring) < most:
            self._ring.append((torch.empty_like(host, device=self._device), torch.cuda.Event()))  # type: ignore[no-untyped-call]
            return self._ring[-1]
        self._num_down += 1
        return self._ring[(self._num_down - 1) % len(self._ring)]

    @torch.inference_mode()
    def _copy(
        self, before: Sequence[torch.cuda.Event], hosts: Sequence[Tensor], scatter: Callable[[int, Tensor], None]
    ) -> float:
        torch.cuda.set_device(self._device)
        for event in before:
            event.synchronize()  # else the time would be that of the steps before, too
        begin = time.monotonic()
        with torch.cuda.stream(self._up):
            for number, host in enumerate(hosts):
                scatter(number, host.to(self._device, non_blocking=True))
        self._up.synchronize()
        return time.monotonic() - begin
