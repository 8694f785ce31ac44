"""Kernels of other packages under the tests of this folder: ``pytest test/ops --backend NAME``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from lightserve.common.device import device_named, ops_backends, pick_device, registry

TORCH_TYPES: dict[str, str] = {}  # of the devices for which they are, by their backends


def load_backend(backend: str) -> None:
    """Import the kernels of an installed package, of a device or of operators alone; nothing if they are ours."""
    for entry in entry_points(group=registry.ENTRY_POINTS):
        platform = device_named(entry.name)
        if platform.ops_backend == backend:
            import_module(platform.ops_module)
            TORCH_TYPES[backend] = platform.torch_type
            return
    if backend in (entry.name for entry in entry_points(group=ops_backends.ENTRY_POINTS)):
        ops_backends.load_ops_backends([backend])
        TORCH_TYPES[backend] = pick_device().torch_type
