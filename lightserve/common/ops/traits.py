"""What kernels may use on the device of this process. It is asked by name, never by a vendor or a model number."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """A device that has none of it gets other kernels or the definitions, and computes the same."""

    has_inline_ptx: bool = False  # kernels may hold NVIDIA's assembly
    dot_dtypes: tuple[torch.dtype, ...] = ()  # of 8 bits: kernels convert to them and multiply them faster than 16 bits
    has_scaled_mm: bool = False  # torch multiplies these, with scales per tensor or row
    has_blockwise_mm: bool = False  # torch multiplies float8 with scales per 128 x 128 weights
    has_grouped_mm: bool = False  # torch multiplies groups of rows whose sizes are on the device, without reading them
    has_wide_mm: bool = False  # ``torch.mm`` of 16-bit numbers takes ``out_dtype=torch.float32``
    has_mixed_mm: bool = False  # ``linear`` and its fused forms multiply float32 with weights in bfloat16, unwidened
    has_bf16_mm: bool = False  # ... and round to bfloat16 what they multiply with these: it has the instructions
    has_streams: bool = False  # streams of ``torch.cuda`` run kernels beside each other
    reads_peers: bool = False  # devices of a node may be able to read each other's memory

    def has_dot(self, dtype: torch.dtype) -> bool:
        return dtype in self.dot_dtypes


_active = DeviceTraits()


def use_traits(traits: DeviceTraits) -> None:
    """A device calls it when it binds its ops: a process computes on one device."""
    global _active
    _active = traits


def active_traits() -> DeviceTraits:
    """What ``use_traits`` was called with last; none before."""
    return _active
