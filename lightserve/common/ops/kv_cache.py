"""What a layer's KV cache stores: the numbers themselves, or 8-bit codes that are multiplied by scales.

Codes are converted to the dtype of the queries when attention reads them. float8 (e4m3) has one fixed scale for each
head. int8 has one for each token and head, which is written together with the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8_MAX = 448.0  # of e4m3; torch converts anything above it to NaN
INT8_MAX = 127.0  # symmetric: -128 is not used
MIN_ABSMAX = 1e-20  # a head of zeros has a scale too; its reciprocal must be finite


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedKv:
    """A layer's cache of keys and values in 8 bits; a value is its code times the scale of its head."""

    codes: Tensor  # [slots, 2 * kv_heads, dim] float8_e4m3fn or int8, the heads of the keys first
    scales: Tensor  # float32: [2 * kv_heads] for float8, [slots, 2 * kv_heads] for int8

    def __post_init__(self) -> None:
        heads = self.codes.shape[1]
        shape = (len(self.codes), heads) if self.codes.dtype == torch.int8 else (heads,)
        if self.codes.dtype not in (torch.int8, torch.float8_e4m3fn) or self.scales.shape != shape:
            raise ValueError(
                f"a KV cache of {tuple(self.codes.shape)} in {self.codes.dtype} cannot have scales of "
                f"{tuple(self.scales.shape)}"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def has_token_scales(self) -> bool:
        return self.scales.ndim == 2

    def write(self, kv: Tensor, slots: Tensor) -> None:
        """Quantise ``[tokens, 2 * kv_heads, dim]`` and store it, one slot for each token."""
        values = kv.float()
        if not self.has_token_scales:
            codes = (values / self.scales[:, None]).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(self.codes.dtype)
            self.codes.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
            return
        absmax = values.abs().amax(-1).clamp_(min=MIN_ABSMAX)
        self.codes.index_copy_(0, slots, (values / absmax[..., None] * INT8_MAX).round_().to(torch.int8))
        self.scales.index_copy_(0, slots, absmax / INT8_MAX)

    def read(self, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """The keys and values of these slots, ``[len(slots), 2 * kv_heads, dim]``."""
        codes, scales = self.codes[slots], self.scales[slots] if self.has_token_scales else self.scales
        return codes.float().mul_(scales[..., None]).to(dtype)


KvCache = Tensor | QuantizedKv  # a tensor is [slots, 2 * kv_heads, dim] in any float dtype


def read_kv(kv_cache: KvCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The keys and values of these slots, ``[len(slots), 2 * kv_heads, dim]`` in ``dtype``."""
    if isinstance(kv_cache, QuantizedKv):
        return kv_cache.read(slots, dtype)
    return kv_cache[slots].to(dtype)
