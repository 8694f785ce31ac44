"""The only place that names a kind of device. New hardware is one entry here and a package of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.errors import ServerError
from lightserve.io_struct import StepLimits
from lightserve.utils.memory import free_ram

CPU_KV_SHARE = 0.25  # of the free RAM: a laptop has other things to do


@dataclass(frozen=True, slots=True)
class DeviceKind:
    name: str  # torch's name
    backend: str  # of common.ops
    backend_module: str  # importing it registers the backend
    comm: str  # torch.distributed's backend
    dtypes: tuple[torch.dtype, ...]  # of a model that it keeps; a model of another is computed in the first
    pipeline_depth: int  # steps under way at once: an accelerator must find its next one ready, a CPU is busy anyway
    computes_apart: bool  # whether a launch returns at once, so that the thread behind it can do other work meanwhile
    step_limits: StepLimits  # unless the operator sets others
    step_timeout_s: float  # unless the operator sets another: no step takes so long
    has_graphs: bool  # whether launches can be captured and replayed: see cuda_graph.py

    def device(self, rank: int) -> torch.device:
        if self.name == "cpu":
            return torch.device(self.name)
        found = torch.cuda.device_count()
        if rank >= found:
            raise ServerError(f"rank {rank} has no device of its own: {found} found; lower tp to {found}")
        return torch.device(self.name, rank)

    def bind(self, device: torch.device, deterministic: bool = False) -> None:
        """Make ``device`` this process's own and bind the ops to its backend.

        ``deterministic``: what a row gives does not depend on the rows beside it, at a price.
        """
        import_module(self.backend_module)
        ops.use_backend(*([ops.fixed_order(self.backend)] if deterministic else []), self.backend)
        self.enter(device)

    def enter(self, device: torch.device) -> None:
        """Make ``device`` this thread's own."""
        if self.name != "cpu":
            torch.cuda.set_device(device)

    def compile_kernels(self, device: torch.device, work: Callable[[], None]) -> None:
        """Compile side by side what ``work`` launches; nothing is called where nothing is compiled."""
        if self.backend != "triton":
            return
        from lightserve.common.compile.ahead import compile_ahead  # imports triton

        with compile_ahead(lambda: self.enter(device)):
            work()

    def dtype_for(self, model_dtype: str | None) -> torch.dtype:
        """What a model is computed in unless told otherwise."""
        dtypes = [dtype for dtype in self.dtypes if self.has_dtype(dtype)]
        return next((dtype for dtype in dtypes if str(dtype) == f"torch.{model_dtype}"), dtypes[0])

    def has_dtype(self, dtype: torch.dtype) -> bool:
        """GPUs before Ampere have no bfloat16."""
        if dtype is not torch.bfloat16 or self.name == "cpu" or not torch.cuda.is_available():
            return True
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def peak_bytes(self, device: torch.device, work: Callable[[], None]) -> int:
        """Memory that ``work`` takes for a while; 0 where the budget for KV leaves plenty."""
        if self.name == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak

    def kv_budget(self, device: torch.device, mem_fraction: float) -> int:
        """Bytes for KV once the weights are loaded: all but 1 - mem_fraction of a GPU, a share of the free RAM."""
        if self.name == "cpu":
            return int(free_ram() * CPU_KV_SHARE)
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - total * (1 - mem_fraction)), 0)


KINDS = {
    "cpu": DeviceKind(
        name="cpu",
        backend="cpu",
        backend_module="lightserve.common.cpu_kernel",
        comm="gloo",
        dtypes=(torch.float32,),
        pipeline_depth=1,
        computes_apart=False,
        step_limits=StepLimits(batch_max_tokens=2048, chunked_prefill_size=64),
        step_timeout_s=600.0,  # 2048 tokens of a model of 8 billion weights on two cores take minutes
        has_graphs=False,
    ),
    "cuda": DeviceKind(
        name="cuda",
        backend="triton",
        backend_module="lightserve.common.triton_kernel",
        comm="nccl",
        dtypes=(torch.bfloat16, torch.float16),
        pipeline_depth=2,
        computes_apart=True,
        # A decode step of an 8B model on an H200 takes 5 ms; with 384 tokens, those of prompts among them, 10. Its
        # matmuls take longer for 448 tokens than for 512, and for 1,088 a fifth longer than for 1,024.
        step_limits=StepLimits(
            batch_max_tokens=8192, chunked_prefill_size=256, sizes=(256, 384, 512, 768, 1024, 1280, 1536)
        ),
        step_timeout_s=60.0,  # 8192 tokens of a model of 70 billion weights take seconds; kernels compile before
        has_graphs=True,
    ),
}


def pick_device(name: str | None = None) -> DeviceKind:
    """The device asked for, or the best one here."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in KINDS:
        raise ServerError(f"device {name!r} is not supported; supported: {sorted(KINDS)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ServerError("no CUDA device is usable here: check the driver with nvidia-smi, or use the device cpu")
    return KINDS[name]


@contextmanager
def enough_memory(remedy: str) -> Iterator[None]:
    """What does not fit is told, with what to do; torch has no class of its own for it on a CPU."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ServerError(f"memory does not suffice ({reason}); {remedy}") from error


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it: from pinned memory, which torch keeps until the copy is over."""
    return torch.from_numpy(array) if device.type == "cpu" else pinned(array).to(device, non_blocking=True)


def pinned(array: np.ndarray) -> Tensor:
    """A copy in memory from which an accelerator copies without waiting: see ``host_memory``."""
    tensor = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
    tensor.numpy()[...] = array
    return tensor


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory from which ``device`` copies without waiting, to be written here: pinned, or the device's own on a CPU.

    torch keeps it until copies from it are over. To pin what lies elsewhere copies it, and from 32,768 numbers on with
    all threads of torch, which then wait for more work at 100 % for milliseconds.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type != "cpu")


class ToHost:
    """Tensors on their way from the device: launched here, waited for in ``tensors``."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = list(tensors)
        self._is_there: torch.cuda.Event | None = None
        if tensors[0].device.type != "cpu":
            self._tensors = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for host, tensor in zip(self._tensors, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record()

    def tensors(self) -> list[Tensor]:
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._tensors
