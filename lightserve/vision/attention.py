"""Attention inside segments of a sequence, not causal: the patches of an image, or of a window in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightserve.common import ops
from lightserve.common.ops import RotaryAngles

HALVES = (torch.bfloat16, torch.float16)  # dtypes of flash attention
PROBE_LENGTHS = (3, 16)
# Tokens of a segment, as of a window. On an H200 both kernels take 112 us for 16,384 patches, but varlen_attn takes the
# host longer to launch: one image of 1024x768 16.7 ms, 13.6 ms with the attention of prompts.
SHORT = 64

Attend = Callable[..., Tensor]  # as ``segment_attention``


class Segments:
    """Consecutive parts of a sequence."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.longest = max(lengths)
        self._lengths = lengths
        self._device = device

    @cached_property
    def borders(self) -> Tensor:
        """``[segments + 1]`` int32: where each begins, and the end of the last one."""
        lengths = torch.tensor([0, *self._lengths], dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self._device)

    @cached_property
    def batch(self) -> ops.AttnBatch:
        """Each is a request whose tokens are all new, and whose KV is where its tokens are."""
        begins, ends = self.borders[:-1], self.borders[1:]
        slots = begins[:, None] + torch.arange(self.longest, dtype=torch.int32, device=self._device)
        numbers = torch.arange(len(begins), dtype=torch.int32, device=self._device)
        return ops.AttnBatch(slots, numbers, begins, ends - begins, torch.zeros_like(begins))

    @cached_property
    def groups(self) -> list[Tensor]:
        """The tokens of all segments of one length, ``[segments, length]`` int64 each."""
        starts, begin = dict[int, list[int]](), 0
        for length in self._lengths:
            starts.setdefault(length, []).append(begin)
            begin += length
        return [
            torch.tensor(begins, device=self._device)[:, None] + torch.arange(length, device=self._device)
            for length, begins in starts.items()
        ]


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None
) -> Tensor:
    """``[tokens, heads, head_dim]`` each. A token attends to all tokens of its segment.

    ``scale``: of the products of queries and keys; None: the usual one.
    """
    attend = flash_attention(query.device, query.dtype, query.shape[2]) or grouped_attention
    return attend(query, key, value, segments, scale)


def packed_attention(query: Tensor, keys_and_values: Tensor, segments: Segments) -> Tensor:
    """``segment_attention`` of keys and values in one tensor, ``[tokens, 2 * heads, head_dim]``."""
    heads, head_dim = query.shape[1:]
    if segments.longest > SHORT or flash_attention(query.device, query.dtype, head_dim) is None:
        return segment_attention(query, keys_and_values[:, :heads], keys_and_values[:, heads:], segments)
    options = ops.AttnOptions(head_dim**-0.5, causal=False)
    return ops.context_attention(query, keys_and_values, keys_and_values, segments.batch, options)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None
) -> Tensor:
    """On any device: segments of the same length are computed together."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for index in segments.groups:
        q, k, v = (tensor[index].transpose(1, 2) for tensor in (query, key, value))  # [segments, heads, length, dim]
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale)
        out[index.flatten()] = attended.transpose(1, 2).flatten(0, 1)
    return out


@lru_cache
def flash_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attend | None:
    """One kernel for segments of any lengths; None: this GPU, torch, or size of heads has none."""
    if device.type == "cpu" or dtype not in HALVES:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn

        attend = partial(_flash_attention, varlen_attn)
        example = torch.ones(sum(PROBE_LENGTHS), 1, head_dim, device=device, dtype=dtype)
        attend(example, example, example, Segments(PROBE_LENGTHS, device))
    except (ImportError, RuntimeError):  # it says what it supports only by what it raises
        return None
    return attend


def _flash_attention(
    varlen_attn: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None = None,
) -> Tensor:
    borders, longest = segments.borders, segments.longest
    options = {} if scale is None else {"scale": scale}  # which older versions of torch do not take
    out: Tensor = varlen_attn(query, key, value, borders, borders, longest, longest, **options)
    return out


def axial_angles(rows: Tensor, columns: Tensor, head_dim: int, theta: float) -> RotaryAngles:
    """Half of a head's pairs rotate by the row of a patch, half by its column."""
    pairs = head_dim // 4
    frequencies = theta ** -(torch.arange(pairs, device=rows.device).float() / pairs)
    angles = torch.cat((rows[:, None] * frequencies, columns[:, None] * frequencies), dim=-1)
    return RotaryAngles(angles.cos(), angles.sin())
