"""Copies between a GPU and pinned host memory on a stream of their own, beside the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

RING = 8  # copies down whose data waits on the GPU; a step waits for the oldest one if there are more


class CudaSideCopies:
    """A copy down first gathers on the stream of the steps, which takes microseconds, into one place of a ring.

    A thread queues copies up, so that launching steps does not wait for that. All copies over the bus are on one
    stream: a copy up reads what the copies down before it have written.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "kv-copies")
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []  # with an event: its data has left
        self._num_down = 0

    def down(self, host: Tensor, gather: Callable[[Tensor], None]) -> None:
        place, has_left = self._place(host)
        steps = torch.cuda.current_stream(self._device)
        steps.wait_event(has_left)
        gather(place)
        self._stream.wait_stream(steps)
        with torch.cuda.stream(self._stream):
            host.copy_(place, non_blocking=True)
        has_left.record(self._stream)

    def finish_down(self) -> None:
        self._stream.synchronize()

    def up(self, hosts: Sequence[Tensor], scatter: Callable[[int, Tensor], None]) -> Future[float]:
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(self._device))
        return self._thread.submit(self._copy, launched, hosts, scatter)

    def _place(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        if len(self._ring) < RING:
            self._ring.append((torch.empty_like(host, device=self._device), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        self._num_down += 1
        return self._ring[(self._num_down - 1) % RING]

    @torch.inference_mode()
    def _copy(
        self, launched: torch.cuda.Event, hosts: Sequence[Tensor], scatter: Callable[[int, Tensor], None]
    ) -> float:
        torch.cuda.set_device(self._device)
        launched.synchronize()  # else the time would be that of the steps before, too
        begin = time.monotonic()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            for number, host in enumerate(hosts):
                scatter(number, host.to(self._device, non_blocking=True))
        self._stream.synchronize()
        return time.monotonic() - begin
