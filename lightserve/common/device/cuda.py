"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device.base import Device, Graphs, Out
from lightserve.common.device.cuda_graph import CudaGraphs
from lightserve.common.device.cuda_side_copies import CudaSideCopies
from lightserve.common.device.memory import pinned
from lightserve.common.device.profile import Profile, gpu_profile
from lightserve.errors import ServerError

FIRST_FLOAT8 = (8, 9)  # compute capability of the first GPUs with e4m3


class CudaDevice(Device):
    name = "cuda"
    torch_type = "cuda"
    ops_backend = "triton"
    ops_module = "lightserve.common.triton_kernel"
    comm_backend = "nccl"
    dtypes = (torch.bfloat16, torch.float16)
    pipeline_depth = 2
    launches_async = True
    step_timeout_s = 60.0  # 8192 tokens of a model of 70 billion weights take seconds; kernels compile before
    max_head_dim = 512  # as in triton_kernel/_attention.py
    reads_peers = True

    def keeps_gguf_packed(self, num_ranks: int) -> bool:
        return True

    def unavailable_reason(self) -> str | None:
        if torch.cuda.is_available():
            return None
        return "no CUDA device is usable here: check the driver with nvidia-smi, or use the device cpu"

    def torch_device(self, index: int) -> torch.device:
        found = torch.cuda.device_count()
        if index >= found:
            raise ServerError(f"rank {index} has no GPU of its own: {found} found; tp x pp x dp may be at most {found}")
        return torch.device(self.torch_type, index)

    def profile(self, device: torch.device) -> Profile:
        return _profile(device)

    def set_current(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def has_dtype(self, dtype: torch.dtype) -> bool:
        """GPUs before Ampere have no bfloat16."""
        if dtype is not torch.bfloat16 or not torch.cuda.is_available():
            return True
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def check_kv_dtype(self, kv_dtype: str | None, device: torch.device) -> None:
        """GPUs before Ada have no e4m3."""
        if kv_dtype == "fp8" and torch.cuda.get_device_capability(device) < FIRST_FLOAT8:
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            raise ServerError(f"kv_dtype fp8 needs a GPU of compute capability 8.9, this one has {found}; use int8")

    def bind(self, device: torch.device, deterministic: bool = False) -> None:
        super().bind(device, deterministic)
        import_module(self.ops_module).use_profile(self.profile(device))

    def compile_kernels(self, device: torch.device, work: Callable[[], None]) -> None:
        from lightserve.common.compile.ahead import compile_ahead  # imports triton

        with compile_ahead(lambda: self.set_current(device)):
            work()

    def graphs(self, function: Callable[[Tensor, Any], Out]) -> Graphs[Any, Out]:
        return CudaGraphs(function)

    def peak_bytes(self, device: torch.device, work: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak

    def kv_budget(self, device: torch.device, mem_fraction: float) -> int:
        """The free memory, less ``1 - mem_fraction`` of the GPU's total."""
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - total * (1 - mem_fraction)), 0)

    def to_device(self, array: np.ndarray, device: torch.device) -> Tensor:
        """From pinned memory, which torch keeps until the copy has finished."""
        return pinned(array).to(device, non_blocking=True)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copy_to_host(self, *tensors: Tensor) -> CudaHostCopy:
        return CudaHostCopy(tensors)

    def side_copies(self, device: torch.device) -> CudaSideCopies:
        return CudaSideCopies(device)


@lru_cache
def _profile(device: torch.device) -> Profile:
    gpu = torch.cuda.get_device_properties(device)
    shared_bytes: int = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it
    return gpu_profile(gpu.name, gpu.multi_processor_count, shared_bytes)


class CudaHostCopy:
    """Copies into pinned memory, and an event behind them on the current stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        for host, tensor in zip(self._tensors, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_done.record()

    def tensors(self) -> list[Tensor]:
        self._is_done.synchronize()
        return self._tensors
