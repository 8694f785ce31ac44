"""Rotary in three torch calls: at small batches the calls are the cost (33 us; 53 us by the definition).

``(low, high)`` rotated by an angle is ``(low, high) * cos + (high, low) * (-sin, sin)``.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightserve.common import ops

# cosines of a step -> the factors of every layer of the step
_factors: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()


@ops.rotary.impl("cpu")
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1]
    factors = _factors.get(cos)
    if factors is None:
        factors = _factors[cos] = _make_factors(cos, sin, q.dtype)
    both_cos, signed_sin = factors
    for x in _joined(q, k):
        turning = x[..., : 2 * half]
        swapped = turning.roll(half, -1)
        turning.mul_(both_cos).addcmul_(swapped, signed_sin)


def _make_factors(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[tokens, 1, rotary_dim]`` each."""
    both_cos = torch.cat((cos, cos), dim=-1)[:, None].to(dtype)
    signed_sin = torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)
    return both_cos, signed_sin


def _joined(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys as one tensor if they are neighbours in the output of one projection."""
    heads, dim = q.shape[1:]
    is_neighbour = (
        q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and k.storage_offset() == q.storage_offset() + heads * dim
        and q.stride() == k.stride() == (q.stride(0), dim, 1)
    )
    if not is_neighbour:
        return q, k
    return (q.as_strided((len(q), heads + k.shape[1], dim), q.stride(), q.storage_offset()),)
