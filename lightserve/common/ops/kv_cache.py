"""What a layer's KV cache stores: the numbers themselves, or 8-bit codes that are multiplied by scales.

Codes are converted to the dtype of the queries when attention reads them. float8 (e4m3) has one fixed scale for each
head. int8 has one for each token and head, which is written together with the token.

A latent has one scale for all of its numbers, in float8 as in int8, which is written together with the token. The
shared key part, an eighth of DeepSeek's latent, is added to the scores of all heads and stays in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8_MAX = 448.0  # of e4m3; torch converts anything above it to NaN
INT8_MAX = 127.0  # symmetric: -128 is not used
MIN_ABSMAX = 1e-20  # a head of zeros has a scale too; its reciprocal must be finite


def row_codes(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of rows ``[..., numbers]`` in float32, and a scale ``[...]`` for each row."""
    largest = INT8_MAX if dtype == torch.int8 else FLOAT8_MAX
    absmax = values.abs().amax(-1).clamp_(min=MIN_ABSMAX)
    scaled = values / absmax[..., None] * largest
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), absmax / largest


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
        codes, scales = row_codes(values, self.codes.dtype)
        self.codes.index_copy_(0, slots, codes)
        self.scales.index_copy_(0, slots, scales)

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


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLatents:
    """A layer's cache of latents in 8 bits; a number is its code times the scale of its token."""

    codes: Tensor  # [slots, 1, rank] float8_e4m3fn or int8
    scales: Tensor  # [slots, 1] float32
    key_parts: Tensor  # [slots, 1, rope] in any float dtype

    def __post_init__(self) -> None:
        slots = len(self.codes)
        sizes = self.scales.shape, self.key_parts.shape[:2]
        if self.codes.dtype not in (torch.int8, torch.float8_e4m3fn) or sizes != ((slots, 1), (slots, 1)):
            raise ValueError(
                f"latents of {tuple(self.codes.shape)} in {self.codes.dtype} cannot have scales of "
                f"{tuple(self.scales.shape)} and key parts of {tuple(self.key_parts.shape)}"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def shape(self) -> torch.Size:
        """As that of a cache that is not quantised."""
        return torch.Size((*self.codes.shape[:2], self.codes.shape[2] + self.key_parts.shape[2]))

    def write(self, latent: Tensor, slots: Tensor) -> None:
        """Quantise ``[tokens, rank + rope]`` and store it, one slot for each token."""
        rank = self.codes.shape[2]
        codes, scales = row_codes(latent[:, :rank].float(), self.codes.dtype)
        self.codes.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8)[:, None])
        self.scales.index_copy_(0, slots, scales[:, None])
        self.key_parts.index_copy_(0, slots, latent[:, None, rank:].to(self.key_parts.dtype))

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """The latents and key parts of these slots, ``[len(slots), rank + rope]``."""
        latents = self.codes[slots, 0].float() * self.scales[slots]
        return torch.cat((latents.to(dtype), self.key_parts[slots, 0].to(dtype)), dim=1)


LatentCache = Tensor | QuantizedLatents  # a tensor is [slots, 1, rank + rope] in any float dtype


def read_latents(latent_cache: LatentCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The latents and key parts of these slots, ``[len(slots), rank + rope]`` in ``dtype``."""
    if isinstance(latent_cache, QuantizedLatents):
        return latent_cache.read(slots, dtype)
    return latent_cache[:, 0].index_select(0, slots).to(dtype)


def store_latents(latent: Tensor, slots: Tensor, latent_cache: LatentCache) -> None:
    """``latent`` ``[tokens, rank + rope]``, one slot for each token."""
    if isinstance(latent_cache, QuantizedLatents):
        latent_cache.write(latent, slots)
    else:
        latent_cache[slots, 0] = latent.to(latent_cache.dtype)
