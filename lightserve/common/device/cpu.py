"""The CPU: tensors live in host memory, so copies are free and launches block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device.base import CopyPart, Device, Wait
from lightserve.common.device.blocking_copies import BlockingCopyStream
from lightserve.common.device.profile import Profile
from lightserve.common.ops import DeviceTraits
from lightserve.messages.control import StepLimits
from lightserve.utils.memory import free_ram

NATIVE = "cpu_native"
KV_SHARE = 0.25  # of the free RAM: a laptop has other programs to run


# A step of SmolLM2-135M takes 0.4 times longer for every token more: see docs/log/2026-11-18.md
WEIGHT_READ_TOKENS = 1.5


class CpuDevice(Device):
    name = "cpu"
    torch_type = "cpu"
    ops_backend = "cpu"
    ops_module = "lightserve.common.cpu_kernel"
    comm_backend = "gloo"
    uses_library: ClassVar[bool] = True  # of csrc, if it was built
    dtypes = (torch.float32,)
    pipeline_depth = 1
    launches_async = False
    warm_up_prompts = (4, 3, 2, 1)  # lengths compile nothing here, and a prompt of 100 tokens takes a second
    step_timeout_s = 600.0  # 2048 tokens of a model of 8 billion weights on two cores take minutes

    def unavailable_reason(self) -> str | None:
        return None

    def torch_device(self, index: int) -> torch.device:
        return torch.device(self.torch_type)

    def profile(self, device: torch.device) -> Profile:
        return Profile(
            name=self.name,
            multiprocessors=os.cpu_count() or 1,
            step_limits=StepLimits(
                batch_max_tokens=2048, chunked_prefill_size=64, weight_read_tokens=WEIGHT_READ_TOKENS
            ),
        )

    def traits(self, device: torch.device) -> DeviceTraits:
        if not self._has_library():
            return DeviceTraits()
        has_instructions = import_module(f"{self.ops_module}._library").multiplies_bf16()
        return DeviceTraits(has_mixed_mm=True, has_bf16_mm=has_instructions)

    def set_current(self, device: torch.device) -> None:
        """Nothing to do: every thread runs on the CPU."""

    def keeps_gguf_packed(self, num_ranks: int) -> bool:
        """Only the C library has fast products with packed weights. Its threads and those of other ranks would spin."""
        return num_ranks == 1 and self._has_library()

    def _has_library(self) -> bool:
        import_module(self.ops_module)
        return self.uses_library and ops.has_backend(NATIVE)

    def _backends(self, deterministic: bool) -> list[str]:
        """The C library's ops first, if it was built: they are batch-invariant."""
        backends = super()._backends(deterministic)
        return [NATIVE, *backends] if self._has_library() else backends

    def check_kv_dtype(self, kv_dtype: str | None, device: torch.device) -> None:
        """Nothing to refuse: torch converts all of them."""

    def kv_budget(self, device: torch.device, mem_fraction: float) -> int:
        """A share of the free RAM, whatever ``mem_fraction`` is."""
        return int(free_ram() * KV_SHARE / self.num_parts)

    def copy_stream(self, device: torch.device) -> CpuCopyStream:
        return CpuCopyStream(device, self.set_current)


class CpuCopyStream(BlockingCopyStream):
    """A step computes when it is launched, so copies down are made at once."""

    def down(self, hosts: Sequence[Tensor], gather: CopyPart) -> Wait:
        """Without a copy on the device."""
        for i, host in enumerate(hosts):
            gather(slice(i, i + 1), host[None])
        return self.finish_down
