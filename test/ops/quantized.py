"""KV caches in 8 bits for the tests of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.triton_kernel.linear._tiled_int4 import TiledInt4Weight, empty_tiled
from test.ops.cases import NAN

FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
CODES = [FLOAT8, INT8]
FLOAT8_NAN = 0x7F


def empty_cache(shape: Sequence[int], codes: torch.dtype, device: str) -> ops.QuantizedKv:
    """A layer of a bigger cache. What was never written is NaN."""
    slots, heads, dim = shape
    layers = torch.zeros(slots, 2, heads, dim, dtype=codes, device=device)
    if codes == INT8:
        return ops.QuantizedKv(layers[:, 1], torch.full((slots, 2 * heads), NAN, device=device)[:, :heads])
    layers.view(torch.uint8).fill_(FLOAT8_NAN)
    return ops.QuantizedKv(layers[:, 1], torch.linspace(0.5, 1.5, heads, device=device))


def quantized(cache: Tensor, codes: torch.dtype) -> ops.QuantizedKv:
    """The same keys and values. Slots of NaN are not written."""
    found = empty_cache(cache.shape, codes, cache.device.type)
    is_written = ~cache.isnan().flatten(1).any(1)
    found.write(cache[is_written], is_written.nonzero()[:, 0])
    return found


def dequantized(cache: ops.QuantizedKv) -> Tensor:
    return cache.read(slice(0, len(cache.codes)), torch.float32)


def empty_latents(
    shape: tuple[int, int, int], codes: torch.dtype, dtype: torch.dtype, device: str
) -> ops.QuantizedLatents:
    """A layer of a bigger cache, of ``shape`` (slots, rank, rope). Scales and key parts never written are NaN."""
    slots, rank, rope = shape
    layers = torch.zeros(slots, 2, 1, rank, dtype=codes, device=device)
    key_parts = torch.full((slots, 2, 1, rope), NAN, dtype=dtype, device=device)
    return ops.QuantizedLatents(layers[:, 1], torch.full((slots, 1), NAN, device=device), key_parts[:, 1])


def quantized_latents(cache: Tensor, rank: int, codes: torch.dtype) -> ops.QuantizedLatents:
    """The same latents ``[slots, 1, rank + rope]``. Slots of NaN are not written."""
    found = empty_latents((len(cache), rank, cache.shape[2] - rank), codes, cache.dtype, cache.device.type)
    is_written = ~cache.isnan().flatten(1).any(1)
    found.write(cache[is_written, 0], is_written.nonzero()[:, 0])
    return found


def tiled(weight: ops.Int4Weight) -> TiledInt4Weight:
    tiles = empty_tiled(weight, weight.device)
    assert tiles is not None
    tiles.store_(weight)
    return tiles
