"""Copies tensors of a checkpoint to the device, several at once through pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from lightserve.common.device import Event, Streams, device_of, host_memory

LANES = 8  # threads; one copies 5 to 8 GB/s out of the page cache, the bus carries over 50
BUFFER_BYTES = 16 * 2**20  # two per lane: 256 MiB of pinned memory, allocated in a tenth of a second
MAX_WAITING = 2 * LANES  # tensors queued for copying: they may be large and in memory


class Upload:
    """A context manager. On exit all tensors are copied, or the first error is raised."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None  # None while no target is of a device with streams
        self._room = threading.BoundedSemaphore(MAX_WAITING)
        self._copies: list[Future[None]] = []
        self._after_copies: list[Callable[[], None]] = []
        self._lanes = threading.local()

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """Copy ``tensor``, which may be a view of a file, at some time before the exit."""
        streams = _streams_of(into.device)
        if streams is None or tensor.device == into.device:
            into.copy_(tensor)
        else:
            self._submit(into.device, streams, lambda: self._lane.copy(into, tensor))

    def convert(self, device: torch.device, tensor: Tensor, receive: Callable[[Tensor], object]) -> None:
        """Call ``receive`` with ``tensor`` on ``device``, at some time before the exit, in some thread."""
        streams = _streams_of(device)
        if streams is None or tensor.device == device:
            receive(tensor.to(device))
        else:
            self._submit(device, streams, lambda: self._lane.convert(device, tensor, receive))

    def after_copies(self, work: Callable[[], None]) -> None:
        """Call ``work`` once all tensors so far are copied: at once without lanes, otherwise on exit."""
        if self._threads is None:
            work()
        else:
            self._after_copies.append(work)

    def _submit(self, device: torch.device, streams: Streams, work: Callable[[], None]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(LANES, initializer=self._open_lane, initargs=(device, streams))
        self._room.acquire()
        launched = streams.current(device).record_event()  # steps may still read the weights
        copy = self._threads.submit(self._run_after, launched, work)
        copy.add_done_callback(lambda _: self._room.release())
        self._copies.append(copy)

    def _run_after(self, event: Event, work: Callable[[], None]) -> None:
        self._lane.wait(event)
        work()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._threads is None:
            return
        self._threads.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for copy in self._copies:
                copy.result()
            for work in self._after_copies:
                work()

    def _open_lane(self, device: torch.device, streams: Streams) -> None:
        torch.set_num_threads(1)  # for this thread: the lanes are parallel enough
        self._lanes.lane = _Lane(device, streams)

    @property
    def _lane(self) -> _Lane:
        lane: _Lane = self._lanes.lane
        return lane


def _streams_of(device: torch.device) -> Streams | None:
    """None, as on a CPU: one copy already uses all that there is."""
    return device_of(device).streams


class _Lane:
    """One thread with two buffers: it fills one while the other is copied to the device."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._streams, self._stream = streams, streams.new(device)
        self._buffers = [host_memory((BUFFER_BYTES,), torch.uint8, device) for _ in range(2)]
        self._copied: list[Event | None] = [None for _ in self._buffers]  # what was in a buffer is on the device
        self._current = 0

    def wait(self, event: Event) -> None:
        """Let what this lane does next wait for ``event``."""
        self._stream.wait_event(event)

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """Copy in chunks along the first dimension; the copy is complete on return."""
        into, tensor = (x if x.dim() else x.view(1) for x in (into, tensor))
        rows = max(1, BUFFER_BYTES // max(1, into[:1].nbytes))
        with self._streams.use(self._stream):
            for begin in range(0, len(into), rows):
                target, source = into[begin : begin + rows], tensor[begin : begin + rows]
                if target.nbytes <= BUFFER_BYTES:
                    self._copy_piece(target, source)
                else:
                    target.copy_(source)
        self._stream.synchronize()

    def convert(self, device: torch.device, tensor: Tensor, receive: Callable[[Tensor], object]) -> None:
        with self._streams.use(self._stream):
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if tensor.dim():
                self.copy(copied, tensor)
            else:
                copied.copy_(tensor)
            retained = receive(copied)
        self._stream.synchronize()
        del retained  # not before: other lanes would get the memory of tensors that they uploaded and this one reads

    def _copy_piece(self, target: Tensor, source: Tensor) -> None:
        current = self._current = 1 - self._current
        copied = self._copied[current]
        if copied is not None:
            copied.synchronize()
        staged = self._buffers[current][: target.nbytes].view(target.dtype).view(target.shape)
        staged.copy_(source)  # reads the file and converts to the model's dtype
        target.copy_(staged, non_blocking=True)
        self._copied[current] = self._stream.record_event()
