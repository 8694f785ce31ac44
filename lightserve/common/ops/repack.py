"""The layout of quantised weights in memory. A backend may register one that its products read faster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

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


Repack = Callable[[QuantizedWeight, int], QuantizedWeight]

_REPACKS: dict[str, Repack] = {}  # by backend


def repacks_for(backend: str) -> Callable[[Repack], Repack]:
    """Register the layout of a backend. Its products must take the usual layout as well."""

    def register(function: Repack) -> Repack:
        _REPACKS[backend] = function
        return function

    return register


def repack(weight: QuantizedWeight, input_bits: int = 8) -> QuantizedWeight:
    """``weight`` ``[..., out, in]`` in the layout of the first active backend that has one. Call it after loading.

    ``input_bits``: to which that backend's products may round their inputs, 8 or 15.
    """
    found = next((_REPACKS[backend] for backend in active_backends() if backend in _REPACKS), None)
    return weight if found is None else found(weight, input_bits)
