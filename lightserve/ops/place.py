"""Where kernels run: on the current device of the kind that operators are replaced for."""

from __future__ import annotations

import torch

from lightserve.common.device import Device


def current_device(platform: Device) -> torch.device:
    """That of this thread, which a program with several devices chooses itself."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != platform.torch_type:
        return platform.torch_device(0)
    return platform.torch_device(torch.accelerator.current_device_index())


def is_current(device: torch.device, platform: Device) -> bool:
    """Whether kernels that are launched now can read the tensors of ``device``."""
    if device.type != platform.torch_type:
        return False
    return device.index is None or device.index == torch.accelerator.current_device_index()
