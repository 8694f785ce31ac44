"""Copies for which the host waits: what a device has that offers no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightserve.common.device.base import CopyPart, Wait


class BlockingAsyncCopy:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [tensor.cpu() for tensor in tensors]

    def tensors(self) -> list[Tensor]:
        return self._copies


class BlockingCopyStream:
    """One tensor after the other. Those up are made by a thread, for which no step waits on the host."""

    def __init__(self, device: torch.device, set_current: Callable[[torch.device], None]) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "kv-copies", set_current, (device,))

    def down(self, hosts: Sequence[Tensor], gather: CopyPart) -> Wait:
        for i, host in enumerate(hosts):
            block = torch.empty_like(host, device=self._device)[None]
            gather(slice(i, i + 1), block)
            host.copy_(block[0])
        return self.finish_down

    def finish_down(self) -> None:
        """Nothing to do: they were made at once."""

    def up(self, hosts: Sequence[Tensor], scatter: CopyPart, after: Wait | None = None) -> Future[float]:
        """The device computes in the order of the launches, so a copy that is launched now comes after the steps."""
        return self._thread.submit(self._copy, hosts, scatter)

    def mark(self) -> Wait:
        return self.finish_down

    @torch.inference_mode()
    def _copy(self, hosts: Sequence[Tensor], scatter: CopyPart) -> float:
        begin = time.monotonic()
        for i, host in enumerate(hosts):
            scatter(slice(i, i + 1), host[None].to(self._device))
        return time.monotonic() - begin
