"""AMD GPUs, by a torch for ROCm, which calls them "cuda". Kernels compile for them; none has run on one yet."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightserve.common.device.base import Communicator, Device
from lightserve.common.device.cuda import CudaDevice, cuda_arch, is_cuda_usable
from lightserve.common.ops import DeviceTraits

# Neither NVIDIA's assembly nor products of torch that were never tried. float8_e4m3fn is native from gfx950 on; MI300X
# and MI325X (gfx942) have the format float8_e4m3fnuz instead, so weights in float8 are multiplied in 16 bits there.
PLAIN = DeviceTraits(has_streams=True)
CDNA3 = replace(PLAIN, dot_dtypes=(torch.int8,))
CDNA4 = replace(PLAIN, dot_dtypes=(torch.int8, torch.float8_e4m3fn))
TRAITS = {"gfx942": CDNA3, "gfx950": CDNA4}


class RocmDevice(CudaDevice):
    """Streams, graphs, pinned memory and RCCL by the names that torch has for CUDA."""

    name = "rocm"
    memory_mapper = None
    memory_pools = None
    caution = "never run on hardware by its authors"

    def unavailable_reason(self) -> str | None:
        if torch.version.hip is None:
            return "this torch is not built for ROCm: install one that is, or use the device cpu"
        if is_cuda_usable():
            return None
        return "no AMD GPU is usable here: check the driver with rocm-smi, or use the device cpu"

    def traits(self, device: torch.device) -> DeviceTraits:
        return rocm_traits(cuda_arch(device))

    def describe(self, device: torch.device) -> str:
        return f"{cuda_arch(device)}, {self.caution}"

    def join_communicator(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
        return Device.join_communicator(self, unique_id, rank, world_size, device)


def rocm_traits(arch: str) -> DeviceTraits:
    """``arch``: as torch names it, with features behind colons."""
    return TRAITS.get(arch.partition(":")[0], PLAIN)
