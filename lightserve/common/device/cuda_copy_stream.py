"""Copies between a GPU and pinned host memory on streams of their own, beside the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lightserve.common.device.base import CopyPart, Wait

BATCH_BYTES = 2**27  # gathered or scattered at once: a launch for every block would take longer than its copy
RING = 8  # batches whose copy down has not ended; steps wait for the oldest if there are more
RING_SHARE = 1 / 128  # of the GPU's memory, at most
QUEUED_BYTES = 2**24  # twice so many are queued on their way up: the input of a step waits behind them, 0.6 ms


class CudaCopyStream:
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
        self._queued_bytes = 0  # on their way up, since the event
        self._last_queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []  # with an event: its data has left
        self._num_batches = 0  # that went down
        self._arrived: dict[int, torch.cuda.Event] = {}  # in host memory, by its address
        total = torch.cuda.get_device_properties(device).total_memory
        self._batch_bytes = min(BATCH_BYTES, int(total * RING_SHARE) // RING)

    def down(self, hosts: Sequence[Tensor], gather: CopyPart) -> Wait:
        arrived: torch.cuda.Event | None = None
        steps = torch.cuda.current_stream(self._device)
        for batch in self._parts(hosts):
            buffer, has_left = self._place(hosts[0])
            steps.wait_event(has_left)
            gather(batch, buffer[: batch.stop - batch.start])
            self._down.wait_stream(steps)
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread may wait long for it
            with torch.cuda.stream(self._down):
                for host, block in zip(hosts[batch], buffer, strict=False):
                    host.copy_(block, non_blocking=True)
                    self._arrived[host.data_ptr()] = arrived
            has_left.record(self._down)
            arrived.record(self._down)
        return _nothing if arrived is None else arrived.synchronize

    def finish_down(self) -> None:
        self._down.synchronize()

    def up(self, hosts: Sequence[Tensor], scatter: CopyPart, after: Wait | None = None) -> Future[float]:
        arrived = {self._arrived[host.data_ptr()] for host in hosts if host.data_ptr() in self._arrived}
        before = [after or self.mark(), *(event.synchronize for event in arrived)]
        return self._thread.submit(self._copy, before, hosts, scatter)

    def mark(self) -> Wait:
        launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
        launched.record(torch.cuda.current_stream(self._device))
        return launched.synchronize

    def _parts(self, hosts: Sequence[Tensor]) -> Iterator[slice]:
        size = self._batch_size(hosts[0]) if hosts else 1
        return (slice(begin, min(begin + size, len(hosts))) for begin in range(0, len(hosts), size))

    def _batch_size(self, host: Tensor) -> int:
        return max(self._batch_bytes // host.nbytes, 1)

    def _place(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Hosts of one call have one shape, and those of the next may have another."""
        number, nbytes = self._num_batches % RING, self._batch_size(host) * host.nbytes
        self._num_batches += 1
        if len(self._ring) == number:
            self._ring.append((self._ring_buffer(nbytes), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        buffer, has_left = self._ring[number]
        if len(buffer) < nbytes:
            has_left.synchronize()
            buffer = self._ring_buffer(nbytes)
            self._ring[number] = buffer, has_left
        return buffer[:nbytes].view(host.dtype).view(-1, *host.shape), has_left

    def _ring_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(max(nbytes, self._batch_bytes), dtype=torch.uint8, device=self._device)

    @torch.inference_mode()
    def _copy(self, before: Sequence[Wait], hosts: Sequence[Tensor], scatter: CopyPart) -> float:
        torch.cuda.set_device(self._device)
        for wait in before:
            wait()  # else the time would be that of the steps before, too
        begin = time.monotonic()
        with torch.cuda.stream(self._up):
            for batch in self._parts(hosts):
                blocks = hosts[0].new_empty((batch.stop - batch.start, *hosts[0].shape), device=self._device)
                for host, block in zip(hosts[batch], blocks, strict=True):
                    block.copy_(host, non_blocking=True)
                    self._bound_queue(block.nbytes)
                scatter(batch, blocks)
        self._up.synchronize()
        return time.monotonic() - begin

    def _bound_queue(self, nbytes: int) -> None:
        """Another copy up was queued. Wait until few enough are left: the bus carries them in their order."""
        self._queued_bytes += nbytes
        if self._queued_bytes < QUEUED_BYTES:
            return
        self._queued_bytes = 0
        before, self._last_queued = self._last_queued, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last_queued.record(self._up)
        before.synchronize()


def _nothing() -> None:
    """There is nothing to wait for."""
