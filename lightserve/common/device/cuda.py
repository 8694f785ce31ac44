"""NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from lightserve.common.device.base import (
    Communicator,
    Device,
    Graphs,
    MemoryMapper,
    Out,
    Stream,
    in_host_memory,
)
from lightserve.common.device.cuda_copy_stream import CudaCopyStream
from lightserve.common.device.cuda_graph import CudaGraphs, as_one_graph
from lightserve.common.device.cuda_mapped import CudaMemoryMapper
from lightserve.common.device.cuda_nccl import NcclCommunicator
from lightserve.common.device.cuda_pool import CudaMemoryPools
from lightserve.common.device.profile import Profile, gpu_profile
from lightserve.common.ops import DeviceTraits
from lightserve.errors import ServerError

EVERY_GPU = DeviceTraits(
    has_inline_ptx=True,
    dot_dtypes=(torch.int8,),
    has_scaled_mm=True,
    has_wide_mm=True,
    has_streams=True,
    reads_peers=True,
)
ADA = replace(EVERY_GPU, dot_dtypes=(torch.int8, torch.float8_e4m3fn))
# ``torch._grouped_mm`` is young. Where it is not listed, torch reads the sizes of groups on the host, which waits for
# the GPU, and which a graph cannot hold.
GROUPED = replace(ADA, has_grouped_mm=hasattr(torch, "_grouped_mm"))
HOPPER = replace(GROUPED, has_blockwise_mm=True)
# by the compute capability from which on GPUs have them
TRAITS = {(0, 0): EVERY_GPU, (8, 9): ADA, (9, 0): HOPPER, (10, 0): GROUPED, (10, 1): ADA}


class CudaStreams:
    def new(self, device: torch.device) -> Stream:
        stream: Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    def current(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def use(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)


class CudaDevice(Device):
    name = "cuda"
    torch_type = "cuda"
    ops_backend = "triton"
    ops_module = "lightserve.common.triton_kernel"
    comm_backend = "nccl"
    dtypes = (torch.bfloat16, torch.float16)
    pipeline_depth = 2
    launches_async = True
    streams = CudaStreams()
    memory_mapper: ClassVar[MemoryMapper | None] = CudaMemoryMapper()
    memory_pools: ClassVar[CudaMemoryPools | None] = CudaMemoryPools()
    step_timeout_s = 60.0  # 8192 tokens of a model of 70 billion weights take seconds; kernels compile before
    max_head_dim = 512  # as in triton_kernel/attention/_attention.py

    def keeps_gguf_packed(self, num_ranks: int) -> bool:
        return True

    def unavailable_reason(self) -> str | None:
        if torch.version.hip is not None:
            return (
                f"this torch is built for ROCm {torch.version.hip}, and the device cuda is for NVIDIA's GPUs: install "
                "a torch for CUDA, or use the device rocm or cpu"
            )
        if is_cuda_usable():
            return None
        return "no CUDA device is usable here: check the driver with nvidia-smi, or use the device cpu"

    def torch_device(self, index: int) -> torch.device:
        count = torch.cuda.device_count()
        if index >= count:
            raise ServerError(f"rank {index} has no GPU of its own: {count} found; tp x pp x dp may be at most {count}")
        return torch.device(self.torch_type, index)

    def profile(self, device: torch.device) -> Profile:
        return _profile(device)

    def traits(self, device: torch.device) -> DeviceTraits:
        return cuda_traits(torch.cuda.get_device_capability(device))

    def set_current(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def has_dtype(self, dtype: torch.dtype) -> bool:
        """GPUs before Ampere have no bfloat16."""
        if dtype is not torch.bfloat16 or not torch.cuda.is_available():
            return True
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def bind(self, device: torch.device, deterministic: bool = False, ops_backends: Sequence[str] = ()) -> None:
        super().bind(device, deterministic, ops_backends)
        import_module(self.ops_module).use_profile(self.profile(device))

    def compile_kernels(self, device: torch.device, work: Callable[[], None]) -> None:
        from lightserve.common.compile.ahead import compile_ahead  # imports triton

        with compile_ahead(lambda: self.set_current(device)):
            work()

    def graphs(self, function: Callable[[Tensor, Any], Out]) -> Graphs[Any, Out]:
        pools = self.memory_pools
        return CudaGraphs(function) if pools is None else CudaGraphs(function, pools.graph_pool)

    def as_one_launch(self, work: Callable[[], object]) -> Callable[[], object]:
        return as_one_graph(work)

    def seconds_of(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def trace_activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    def describe(self, device: torch.device) -> str:
        major, minor = torch.cuda.get_device_capability(device)
        has_fp8 = self.traits(device).has_dot(torch.float8_e4m3fn)
        return f"compute capability {major}.{minor}{', has fp8' if has_fp8 else ''}"

    def reads_peer(self, device: torch.device, peer: int) -> bool:
        return torch.cuda.can_device_access_peer(device.index, peer)

    def join_communicator(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
        return NcclCommunicator(unique_id, rank, world_size, device)

    def free_cached_memory(self) -> None:
        torch.cuda.empty_cache()

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
        return in_host_memory(self, array).to(device, non_blocking=True)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copy_to_host(self, *tensors: Tensor) -> CudaAsyncCopy:
        return CudaAsyncCopy(tensors)

    def copy_stream(self, device: torch.device) -> CudaCopyStream:
        return CudaCopyStream(device)


def is_cuda_usable() -> bool:
    return torch.cuda.is_available()


def cuda_arch(device: torch.device) -> str:
    """Of a GPU of a torch for ROCm, such as gfx942:sramecc+:xnack-."""
    return str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))


def cuda_traits(capability: tuple[int, int]) -> DeviceTraits:
    return TRAITS[max(first for first in TRAITS if first <= capability)]


@lru_cache
def _profile(device: torch.device) -> Profile:
    gpu = torch.cuda.get_device_properties(device)
    shared_bytes = int(getattr(gpu, "shared_memory_per_block_optin", gpu.shared_memory_per_block))
    return gpu_profile(gpu.name, gpu.multi_processor_count, shared_bytes, gpu.total_memory)


class CudaAsyncCopy:
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
