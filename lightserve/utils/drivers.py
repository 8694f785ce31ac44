"""Which drivers of GPUs this machine has. Looked up without torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class GpuDriver(NamedTuple):
    control: Path  # exists if the driver is loaded
    query: Sequence[str]  # a command that prints a line for each GPU

    @property
    def is_loaded(self) -> bool:
        return self.control.exists()


_NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_AMD_QUERY = ("rocm-smi", "--showproductname", "--csv")
# by the name of the device that uses it (--device)
DRIVERS = {
    "cuda": GpuDriver(Path("/dev/nvidiactl"), _NVIDIA_QUERY),
    "rocm": GpuDriver(Path("/dev/kfd"), _AMD_QUERY),
}


def loaded_drivers() -> dict[str, GpuDriver]:
    return {name: driver for name, driver in DRIVERS.items() if driver.is_loaded}


def may_have_gpu(device: str | None) -> bool:
    """Whether ``--device`` may mean a GPU with a driver that is known here; a device of another package may use any."""
    if device in DRIVERS:
        return DRIVERS[device].is_loaded
    return device != "cpu" and bool(loaded_drivers())
