"""The devices that operators are replaced for in these tests."""

from __future__ import annotations

import pytest
import torch

import lightserve.ops
from lightserve.common.device import API_VERSION
from lightserve.common.device.cpu import CpuDevice


class Interpreted(CpuDevice):
    """Triton's kernels, interpreted; on a machine with a GPU, the device cuda is tested instead."""

    name = "interpreted"
    api_version = API_VERSION
    ops_backend = "triton"
    ops_module = "lightserve.common.triton_kernel"
    uses_library = False


DEVICES = ["cpu", "cuda" if torch.cuda.is_available() else "interpreted"]
each_device = pytest.mark.parametrize("device", DEVICES)


def enable_all(device: str) -> list[str]:
    """Those that do not pay, too."""
    return lightserve.ops.only_enable(list(lightserve.ops.ATEN), device)


def on(device: str) -> str:
    return "cuda" if device == "cuda" else "cpu"
