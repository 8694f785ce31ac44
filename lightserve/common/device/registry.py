"""The devices by name: the built-in ones, and those that other packages offer as entry points.

Another package registers its ``Device`` subclass in its own pyproject.toml:

    [project.entry-points."lightserve.devices"]
    npu = "lightserve_npu:NpuDevice"

The class states by ``api_version`` which version of ``Device`` it was written for.

The copies are for callers that hold a ``torch.device`` and not a ``Device``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import numpy as np
import torch
from torch import Tensor

from lightserve.common.device.base import API_VERSION, AsyncCopy, Device, bound_device
from lightserve.common.device.cpu import CpuDevice
from lightserve.common.device.cuda import CudaDevice
from lightserve.common.device.rocm import RocmDevice
from lightserve.errors import ServerError

ENTRY_POINTS = "lightserve.devices"
BUILT_IN: dict[str, Device] = {device.name: device for device in (CudaDevice(), RocmDevice(), CpuDevice())}


def device_named(name: str) -> Device:
    """The device that is registered under ``name``, whether this machine has one or not."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in _entry_points():
        return _loaded(name)
    raise ServerError(f"device {name!r} is not supported; supported: {_names()}")


def pick_device(name: str | None = None) -> Device:
    """The device that the operator named, or the best one of this machine: an accelerator if there is one."""
    if name is None:
        return next(device for device in _by_preference() if device.unavailable_reason() is None)
    device = device_named(name)
    reason = device.unavailable_reason()
    if reason is not None:
        raise ServerError(reason)
    return device


def unusable_packages() -> dict[str, str]:
    """The devices of other packages that this machine cannot use, and why. All are loaded, as to pick the CPU."""
    reasons = {name: _loaded(name).unavailable_reason() for name in _entry_points()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def device_of(device: torch.device) -> Device:
    """The ``Device`` of a torch device: that of this process, or one with such tensors."""
    bound = bound_device()
    return bound if bound is not None and bound.torch_type == device.type else _of_type(device.type)


@cache
def _of_type(torch_type: str) -> Device:
    """Devices of several vendors may call their tensors the same. One that this machine has is meant."""
    built_in = [device for device in BUILT_IN.values() if device.torch_type == torch_type]
    usable = [device for device in built_in if device.unavailable_reason() is None]
    if usable:
        return usable[0]
    others = [device for device in map(_loaded, _entry_points()) if device.torch_type == torch_type]
    available = [device for device in others if device.unavailable_reason() is None]
    if not available + built_in:
        raise ServerError(f"no device of this machine has tensors of the type {torch_type}; supported: {_names()}")
    return (available + built_in)[0]


def _by_preference() -> Iterator[Device]:
    """The built-in accelerators, those of other packages, and the CPU last. Packages load only if they are reached."""
    yield from (device for name, device in BUILT_IN.items() if name != CpuDevice.name)
    yield from (_loaded(name) for name in _entry_points())
    yield BUILT_IN[CpuDevice.name]


def _names() -> list[str]:
    return sorted({*BUILT_IN, *_entry_points()})


def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


@cache
def _loaded(name: str) -> Device:
    entry = _entry_points()[name]
    try:
        kind = entry.load()
    except (ImportError, AttributeError) as error:
        raise ServerError(f"device {name!r}: {entry.value} cannot be imported ({error})") from error
    if not isinstance(kind, type) or not issubclass(kind, Device):
        raise ServerError(f"device {name!r}: {entry.value} is no subclass of lightserve.common.device.Device")
    if kind.api_version != API_VERSION:
        raise ServerError(
            f"device {name!r}: {entry.value} was written for version {kind.api_version} of "
            f"lightserve.common.device.Device, and this is version {API_VERSION}; install a release of its package for "
            "it, which sets api_version"
        )
    if missing := _missing(kind):
        raise ServerError(f"device {name!r}: {entry.value} lacks {', '.join(missing)}; see docs/adding_a_device.md")
    if kind.name != name:
        raise ServerError(f"device {name!r}: {entry.value} has the name {kind.name!r}; its entry point needs the same")
    return kind()


def _missing(kind: type[Device]) -> list[str]:
    """Methods and attributes that a device must have."""
    attributes = [name for name in Device.__annotations__ if not hasattr(kind, name)]
    return [*attributes, *sorted(kind.__abstractmethods__)]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of ``array`` on ``device``. The host does not wait for it."""
    return device_of(device).to_device(array, device)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory to write into, from which ``device`` copies without making the host wait: pinned for a GPU.

    Torch keeps it until the copies from it have finished. Pinning memory that was allocated otherwise would copy it.
    From 32,768 numbers on, that copy would use all threads of torch, which then spin at 100 % for milliseconds.
    """
    return device_of(device).host_memory(shape, dtype)


def copy_to_host(*tensors: Tensor) -> AsyncCopy:
    """Start to copy ``tensors`` of one device to the host; ``AsyncCopy.tensors`` waits for them."""
    return device_of(tensors[0].device).copy_to_host(*tensors)
