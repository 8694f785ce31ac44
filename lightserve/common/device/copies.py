"""Copies between host and device, for callers that hold a ``torch.device`` and not a ``Device``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device import registry
from lightserve.common.device.base import AsyncCopy


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of ``array`` on ``device``. The host does not wait for it."""
    return registry.device_of(device).to_device(array, device)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory to write into, from which ``device`` copies without making the host wait: pinned for a GPU.

    Torch keeps it until the copies from it have finished. Pinning memory that was allocated otherwise would copy it.
    From 32,768 numbers on, that copy would use all threads of torch, which then spin at 100 % for milliseconds.
    """
    return registry.device_of(device).host_memory(shape, dtype)


def copy_to_host(*tensors: Tensor) -> AsyncCopy:
    """Start to copy ``tensors`` of one device to the host; ``AsyncCopy.tensors`` waits for them."""
    return registry.device_of(tensors[0].device).copy_to_host(*tensors)
