"""Matmul with weights in oneDNN's blocked layout, on x86.

MKL, which torch calls for float32, repacks the weight at every call; at batch 8 that takes longer than the product. A
copy in oneDNN's layout costs the memory of the weight again, so copies are made only while there is room. A single row
is faster without.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from lightserve.common import ops
from lightserve.utils.memory import free_ram

RAM_SHARE = 0.25  # of the free RAM for one copy, so that the last ones leave room
# Numbers of rows that packed weights are multiplied with; others are padded. All matmuls of SmolLM2 in ms, plain and
# packed: 1 row 26 and 31, 2: 28 and 29, 8: 59 and 32, 32: 84 and 56; from 96 on they are equal. oneDNN compiles for
# every number of rows, milliseconds each, and keeps the result: without padding, prompts of 600 lengths took 1 GB.
SIZES = (2, 4, 8, 16, 24, 32, 48, 64)
PACK_FOR = 32  # rows that the layout is optimised for; it serves any number


class _PackedWeights:
    """Packed copies of weights, made at first use, and again after the weight has changed."""

    def __init__(self) -> None:
        self.is_usable = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        # weight -> (its version, the copy)
        self._copies: MutableMapping[Tensor, tuple[int, Tensor | None]] = WeakTensorKeyDictionary()

    def get(self, weight: Tensor) -> Tensor | None:
        version = weight._version
        entry = self._copies.get(weight)
        if entry is None or entry[0] != version:
            entry = version, self._pack(weight)
            self._copies[weight] = entry
        return entry[1]

    def _pack(self, weight: Tensor) -> Tensor | None:
        if weight.nbytes > free_ram() * RAM_SHARE:
            return None
        with torch.inference_mode(False):
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_FOR)
        return packed


_packed_weights = _PackedWeights()


@ops.linear.impl("cpu")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    packed = _packed(x, weight)
    if packed is None:
        return F.linear(x, weight.to(x.dtype), bias)
    size = next(size for size in SIZES if size >= len(x))
    padded = x if size == len(x) else F.pad(x, (0, 0, 0, size - len(x)))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")
    return out[: len(x)]


def _packed(x: Tensor, weight: Tensor) -> Tensor | None:
    """The packed weight, if that is faster."""
    is_fit = x.dim() == 2 and SIZES[0] <= len(x) <= SIZES[-1] and weight.dtype == torch.float32
    if not is_fit or weight.is_inference() or not _packed_weights.is_usable:
        return None
    return _packed_weights.get(weight)
