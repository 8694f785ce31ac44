"""The only place that names a kind of device. New hardware is one entry here and a package of ops."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch

from lightserve.common import ops
from lightserve.errors import ServerError
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

    def device(self, rank: int) -> torch.device:
        return torch.device(self.name) if self.name == "cpu" else torch.device(self.name, rank)

    def bind(self, device: torch.device) -> None:
        """Make ``device`` this process's own and bind the ops to its backend."""
        import_module(self.backend_module)
        ops.use_backend(self.backend)
        if self.name != "cpu":
            torch.cuda.set_device(device)

    def dtype_for(self, model_dtype: str | None) -> torch.dtype:
        """What a model is computed in unless told otherwise."""
        return next((dtype for dtype in self.dtypes if str(dtype) == f"torch.{model_dtype}"), self.dtypes[0])

    def kv_budget(self, device: torch.device, mem_fraction: float) -> int:
        """Bytes for KV once the weights are loaded: all but 1 - mem_fraction of a GPU, a share of the free RAM."""
        if self.name == "cpu":
            return int(free_ram() * CPU_KV_SHARE)
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - total * (1 - mem_fraction)), 0)


KINDS = {
    "cpu": DeviceKind("cpu", "cpu", "lightserve.common.cpu_kernel", "gloo", (torch.float32,), 1),
    "cuda": DeviceKind("cuda", "triton", "lightserve.common.triton_kernel", "nccl", (torch.bfloat16, torch.float16), 2),
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
