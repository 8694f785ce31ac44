"""The layout of weights in memory. A backend may register one that its products read faster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from lightserve.common.ops.quantized_weight import QuantizedWeight
from lightserve.common.ops.registry import active_backends


class FusesNorm(ABC):
    """A weight in a layout whose product can be fused with the norm before it."""

    @abstractmethod
    def add_rms_norm_linear(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, bias: Tensor | None, gated: bool
    ) -> Tensor | None:
        """The product of ``ops.add_rms_norm_linear``, or of ``add_rms_norm_gate_up`` if ``gated``.

        The sum is in ``residual`` afterwards. None: it was not computed.
        """


# of a weight ``[out, in]`` or ``[experts, out, in]`` in the usual layout, without memory; where the packed one shall
# be; and ``input_bits``
EmptyPacked = Callable[[QuantizedWeight, torch.device, int], QuantizedWeight | None]

_LAYOUTS: dict[str, EmptyPacked] = {}  # by backend


def packs_for(backend: str) -> Callable[[EmptyPacked], EmptyPacked]:
    """Register the layout of a backend. Its products must take the usual layout as well, and ``experts`` both."""

    def register(function: EmptyPacked) -> EmptyPacked:
        _LAYOUTS[backend] = function
        return function

    return register


def empty_packed(usual: QuantizedWeight, device: torch.device, input_bits: int = 8) -> QuantizedWeight | None:
    """Memory on ``device`` for weights like ``usual``, in the layout of the first active backend that has one.

    None: they keep the usual layout. ``input_bits``: to which that backend's products may round their inputs, 8 or 15.
    """
    layout = next((_LAYOUTS[backend] for backend in active_backends() if backend in _LAYOUTS), None)
    return None if layout is None else layout(usual, device, input_bits)


EmptyWeight = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]

_ALLOCATIONS: dict[str, EmptyWeight] = {}  # by backend


def allocates_for(backend: str) -> Callable[[EmptyWeight], EmptyWeight]:
    """Register how a backend lays out weights that are not quantised, ``[out, in]`` or ``[experts, out, in]``.

    The tensor has this shape and dtype, and reads and copies like any other; only where its numbers are in memory
    differs, such as columns side by side or a vendor's blocks. So a checkpoint is copied into it, once or again. The
    products must take the usual layout as well: not all weights are allocated here.
    """

    def register(function: EmptyWeight) -> EmptyWeight:
        _ALLOCATIONS[backend] = function
        return function

    return register


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a weight, in the layout of the first active backend that has one; else its rows are contiguous."""
    layout = next((_ALLOCATIONS[backend] for backend in active_backends() if backend in _ALLOCATIONS), None)
    if layout is None or device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return layout(shape, dtype, device)
